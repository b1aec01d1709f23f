"""Expert parallelism: tokens are sent to the ranks that hold their experts."""

from .install import install_experts, take_off_experts
from .kinds import count_of, takes_routed
from .list_forward import parameters_of_lists
from .lists import ExpertList, expert_lists, on_its_rank

__all__ = [
    "ExpertList",
    "count_of",
    "expert_lists",
    "install_experts",
    "on_its_rank",
    "parameters_of_lists",
    "take_off_experts",
    "takes_routed",
]
