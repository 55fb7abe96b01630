"""DeepSeek-V4, split over attention and FFN ranks by afd_ops, or whole in one process.

The formulas are those of the model's description; routed experts and everything else keep the names of its checkpoint.
Not here: the multi-token prediction block, and fp8 and fp4 weights.
"""

from .config import FLASH, PRO, Config
from .experts import LocalExperts, RemoteExperts
from .model import DecoderLayer, DeepseekV4, Pending
from .ubatches import Ubatch, interleave
from .weights import Checkpoint, Random, load, load_experts

__all__ = [
    "FLASH",
    "PRO",
    "Checkpoint",
    "Config",
    "DecoderLayer",
    "DeepseekV4",
    "LocalExperts",
    "Pending",
    "Random",
    "RemoteExperts",
    "Ubatch",
    "interleave",
    "load",
    "load_experts",
]
