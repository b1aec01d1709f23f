"""``GlobalTensor``, the tensor class that users hold."""
