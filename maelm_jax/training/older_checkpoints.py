"""Loads checkpoints whose parameters have older paths.

A path here is that of a leaf in the tree of a checkpoint, such as
opt_state/1/0/mu/encoder/blocks/attention/query/kernel.
"""

import collections.abc
import re
import typing

import jax
from flax import traverse_util

# (pattern in an older path, its replacement). No pattern matches a current path.
RENAMED = (
    (r"/blocks/(query|key|value|out)/", r"/blocks/attention/\1/"),
    (r"/blocks/(up|down)/", r"/blocks/feed_forward/\1/"),
    (r"/blocks/output_norm/", r"/blocks/feed_forward_norm/"),
    (r"/blocks/cross/attention_norm/", r"/blocks/cross_attention_norm/"),
    (r"/blocks/cross/", r"/blocks/cross_attention/"),
)


def current_path(keys: tuple) -> str:
    """Returns the path that a leaf has today.

    Args:
        keys: Keys of a leaf, of JAX or of flax.traverse_util. The fields of a named tuple are
            dictionary keys in a checkpoint; both give the same path.
    """
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    for pattern, replacement in RENAMED:
        path = re.sub(pattern, replacement, path)
    return path


def by_current_path(tree: typing.Any) -> dict[str, typing.Any]:
    """Returns {current path: leaf}."""
    return {current_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def with_structure_of(structure: typing.Any, leaves: typing.Any) -> typing.Any:
    """Returns the leaves of the tree `leaves` in the structure of the tree `structure`.

    Leaves correspond by their current paths, so that either tree can be an older one.
    """
    values = by_current_path(leaves)
    return jax.tree_util.tree_map_with_path(lambda keys, _: values[current_path(keys)], structure)


def restricted_to(paths: collections.abc.Container[str], params: dict) -> dict:
    """Returns the part of `params` whose leaves have one of these current paths."""
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict(
        {keys: leaf for keys, leaf in flat.items() if current_path(keys) in paths}
    )


def renamed(params: dict) -> dict:
    """Returns `params` with current paths."""
    return traverse_util.unflatten_dict(by_current_path(params), sep="/")
