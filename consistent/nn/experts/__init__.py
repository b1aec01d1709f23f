"""Expert parallelism: tokens are sent to the ranks that hold their experts."""

from .install import install_experts, uninstall_experts
from .kinds import expert_count, takes_routed_tokens
from .list_forward import parameters_of_lists
from .lists import ExpertList, expert_lists, sbp_on_one_rank

__all__ = [
    "ExpertList",
    "expert_count",
    "expert_lists",
    "install_experts",
    "parameters_of_lists",
    "sbp_on_one_rank",
    "takes_routed_tokens",
    "uninstall_experts",
]
