"""One file a resolver; `zmqdist.resolvers` has their names."""
