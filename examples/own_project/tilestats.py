"""A small library: statistics of tiles, on arrays of any library."""

import dask.array as da


def normalise(tile):
    """Shift a tile to mean 0 and scale it to standard deviation 1, where it is."""
    return (tile - tile.mean()) / tile.std()


def contrast(image: da.Array) -> da.Array:
    """Return the largest absolute value of each column, of normalised tiles."""
    return abs(image.map_blocks(normalise)).max(axis=0)
