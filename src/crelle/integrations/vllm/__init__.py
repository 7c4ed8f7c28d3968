"""Crelle checkpoints in vLLM: an out-of-tree quantization method, found by the entry point `vllm.general_plugins`.

    vllm serve DIR          a directory that `crelle quantize` wrote; no flags

    versions.py     of vLLM that this is written for
    config.py       the quantization_config of a checkpoint; which layer gets which method
    arrival.py      a matrix while the loader hands over its tensors, cut for this rank as soon as it is whole
    product.py      the matrices of one layer as kernels multiply by them, and the custom ops that vLLM calls
    linear.py embedding.py experts.py      the methods
    stream.py       what tensors need on their way besides their names

arrival.py and product.py import no vLLM. vLLM loads plugins in every process, whatever model it is to serve: what is
wrong with a Crelle checkpoint or with this installation is said when such a checkpoint is opened, not before.
"""

import logging


def register() -> None:
    """Make the quantization method 'crelle' known; vLLM may call this more than once."""
    try:
        from crelle.integrations.vllm import config  # noqa: F401  # registers its class
    except ImportError as e:
        from crelle.integrations.vllm.versions import wrong_version

        reason = wrong_version() or "this vLLM is not what Crelle's plugin was written for"
        logging.getLogger("vllm.crelle").warning("%s; Crelle checkpoints cannot be served: %s", reason, e)
