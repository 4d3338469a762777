"""Calls of torch whose result may depend on the order in which a device adds or writes.

The names are those of the functions and methods that ``torch.use_deterministic_algorithms`` refuses
or replaces, as its documentation lists them.
"""

from typing import Final

FORWARD: Final = frozenset(
    (
        *("index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_"),
        *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce"),
        *("scatter_reduce_", "put_", "__setitem__", "bincount", "histc", "cumsum", "cumsum_"),
        *("kthvalue", "median", "nll_loss", "ctc_loss", "grid_sample", "interpolate"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
        *("conv_transpose3d", "embedding_bag", "scaled_dot_product_attention"),
    )
)
"""Calls that may return something else when they are repeated."""

BACKWARD: Final = frozenset(
    (
        *("embedding", "gather", "index_select", "repeat_interleave", "take_along_dim"),
        *("__getitem__", "adaptive_avg_pool2d", "max_pool3d", "pad"),
    )
)
"""Calls of which that is true of the gradient alone."""
