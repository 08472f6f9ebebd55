"""Bytes at rest: what stores promise, the record format, local files, compression where it pays."""
