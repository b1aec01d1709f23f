"""Expert parallelism: tokens are sent to the ranks that hold their experts."""

from .forward import install_experts, take_off_experts
from .kinds import count_of, takes_routed

__all__ = ["count_of", "install_experts", "take_off_experts", "takes_routed"]
