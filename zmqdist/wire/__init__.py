"""Bytes to values and back: hello, headers, arrays, and the two codecs with honest names.

`safe` builds nothing but a closed set of types, whatever the bytes say; `trusted` runs what the sender wrote and is only
for authenticated peers that may send code. Nothing here waits or opens a socket.
"""
