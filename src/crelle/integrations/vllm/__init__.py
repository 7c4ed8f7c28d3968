"""Crelle checkpoints in vLLM: an out-of-tree quantization method, found by the entry point `vllm.general_plugins`.

    vllm serve DIR          a directory that `crelle quantize` wrote; no flags

    versions.py     of vLLM that this is written for
    config.py       the quantization_config of a checkpoint; which layer gets which method
    arrival.py      a matrix while the loader hands over its tensors, cut for this rank as soon as it is whole
    product.py      the matrices of one layer as kernels multiply by them, and the custom ops that vLLM calls
    linear.py embedding.py experts.py      the methods
    stream.py       what tensors need on their way besides their names
    verification.py the bytes of a checkpoint against its checksums

arrival.py, product.py and verification.py import no vLLM. vLLM loads plugins in every process, whatever model it is to
serve: what is wrong with a Crelle checkpoint or with this installation is said when such a checkpoint is opened, not
before.
"""

import logging


def register() -> None:
    """Make the quantization method 'crelle' known; vLLM may call this more than once."""
    try:
        from crelle.integrations.vllm import config  # noqa: F401  # registers its class
    except Exception as e:  # whatever it is: other models must be served all the same
        said = str(e).splitlines() or [type(e).__name__]
        logging.getLogger("vllm.crelle").warning("%s; Crelle checkpoints cannot be served: %s", _reason(), said[0])


def _reason() -> str:
    """Return why the plugin may have failed."""
    other = "this vLLM is not what Crelle's plugin was written for, or this installation is broken"
    try:
        from crelle.integrations.vllm.versions import wrong_version

        return wrong_version() or other
    except Exception:  # a vLLM that does not tell its version
        return other
