"""Conversion of values to bytes and back: hello, headers, arrays, and two codecs.

`safe` decodes only a closed set of types, whatever the bytes are. `trusted` executes code that the
sender has pickled, so use it only for authenticated peers that may send code. No function of this
folder waits or opens a socket.
"""
