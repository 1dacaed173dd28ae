"""The checks behind `zmqdist doctor`: each says what is wrong and what to do."""
