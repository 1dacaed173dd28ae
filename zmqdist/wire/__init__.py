"""Values to bytes and back: hello, headers, arrays, and two codecs.

`safe` builds only a closed set of types, whatever the bytes say. `trusted` executes what the sender has pickled, so it is only for
authenticated peers that may send code. Nothing here waits or opens a socket.
"""
