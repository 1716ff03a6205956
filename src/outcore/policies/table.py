"""table: list every policy by name.

A new policy adds a file, a row here and a page in docs/policies.
"""

from __future__ import annotations

from outcore.policies.cheap import Cheap
from outcore.policies.chen import ChenSqrt
from outcore.policies.keep_all import KeepAll
from outcore.policies.lms import Lms
from outcore.policies.policy import Policy
from outcore.policies.pooch import Pooch
from outcore.policies.pooch_paper import PoochPaper
from outcore.policies.recompute_all import RecomputeAll
from outcore.policies.search import Search
from outcore.policies.superneurons import SuperNeurons
from outcore.policies.superneurons_cost_aware import SuperNeuronsCostAware
from outcore.policies.swap_all import SwapAll
from outcore.policies.swap_all_naive import SwapAllNaive
from outcore.policies.swap_opt import SwapOpt
from outcore.policies.vdnn_all import VdnnAll
from outcore.policies.vdnn_conv import VdnnConv
from outcore.policies.vdnn_dyn import VdnnDyn
from outcore.policies.window import Window

POLICIES: dict[str, type[Policy]] = {
    "keep-all": KeepAll,
    "swap-all-naive": SwapAllNaive,
    "swap-all": SwapAll,
    "recompute-all": RecomputeAll,
    "chen-sqrt": ChenSqrt,
    "superneurons": SuperNeurons,
    "superneurons-cost-aware": SuperNeuronsCostAware,
    "vdnn-all": VdnnAll,
    "vdnn-conv": VdnnConv,
    "vdnn-dyn": VdnnDyn,
    "lms": Lms,
    "window": Window,
    "swap-opt": SwapOpt,
    "cheap": Cheap,
    "pooch": Pooch,
    "pooch-paper": PoochPaper,
    "search": Search,
}
