"""The ways bytes travel: torch.distributed between processes, or threads of one process."""
