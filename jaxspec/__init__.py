"""Draft-model-free speculative decoding for Qwen3 in JAX.

Axis letters in annotations and docstrings:
  B rows of the batch        T rows of a block          P text capacity in tokens
  S cache capacity in slots  L layers                   D width of the residual stream
  N query heads              K key-value heads          G = N / K query heads a kv head
  H width of a head          F feed-forward width       V vocabulary rows
  C candidates               M draft tokens a candidate R logit rows of a block
"""

from jaxspec.config import GenerateConfig as GenerateConfig
from jaxspec.config import Qwen3Config as Qwen3Config
from jaxspec.drafters import Auto as Auto
from jaxspec.drafters import Drafter as Drafter
from jaxspec.drafters import Lookahead as Lookahead
from jaxspec.drafters import NoDraft as NoDraft
from jaxspec.drafters import Outcome as Outcome
from jaxspec.drafters import PromptLookup as PromptLookup
from jaxspec.drafters import Proposal as Proposal
from jaxspec.drafters import current_tokens as current_tokens
from jaxspec.generation import generate as generate
from jaxspec.generation import stream as stream
from jaxspec.layout import BlockLayout as BlockLayout
from jaxspec.model import Qwen3 as Qwen3
from jaxspec.result import Generation as Generation
from jaxspec.stats import Difference as Difference
from jaxspec.stats import first_difference as first_difference

__version__ = "0.1.0"
