"""table: list every policy by name.

A new policy adds a file, a row here and a page in docs/policies.
"""

from __future__ import annotations

from outcore.policies.chen import ChenSqrt
from outcore.policies.keep_all import KeepAll
from outcore.policies.lms.lms import Lms
from outcore.policies.policy import Policy
from outcore.policies.pooch.cheap import Cheap
from outcore.policies.pooch.paper import PoochPaper
from outcore.policies.pooch.pooch import Pooch
from outcore.policies.pooch.swap_all import SwapAll
from outcore.policies.pooch.swap_all_naive import SwapAllNaive
from outcore.policies.pooch.swap_opt import SwapOpt
from outcore.policies.recompute_all import RecomputeAll
from outcore.policies.search.search import Search
from outcore.policies.superneurons.cost_aware import SuperNeuronsCostAware
from outcore.policies.superneurons.superneurons import SuperNeurons
from outcore.policies.vdnn.vdnn_all import VdnnAll
from outcore.policies.vdnn.vdnn_conv import VdnnConv
from outcore.policies.vdnn.vdnn_dyn import VdnnDyn
from outcore.policies.window.window import Window

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
