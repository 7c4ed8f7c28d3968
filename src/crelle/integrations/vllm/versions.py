"""Which versions of vLLM the plugin is written for."""

VERSIONS = ("0.32",)  # that it was tested with


def wrong_version() -> str | None:
    """Return None, or that the installed vLLM is not one that the plugin was written for."""
    from vllm.version import __version__

    if any(__version__ == v or __version__.startswith(f"{v}.") for v in VERSIONS):
        return None
    return f"this Crelle's vLLM plugin is for vLLM {', '.join(VERSIONS)}, and the installed one is {__version__}"
