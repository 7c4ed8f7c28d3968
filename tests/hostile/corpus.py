"""Hostile models, built by code: name -> (how to build it, the words of the sentence that must refuse it).

Cases without words are harmless, odd as they look: they must load. Every directory holds Python files and a pickle that
would leave a mark where they run. The cases register themselves when their modules are imported.
"""

import corpus_files  # noqa: F401
import corpus_gguf  # noqa: F401
import corpus_quantized  # noqa: F401
import corpus_tokenizers  # noqa: F401
from corpus_base import CASES, MARK

__all__ = ["CASES", "MARK"]
