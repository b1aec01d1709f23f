"""Makes all ranks raise one message, which says where each of them is, if a rank waits in vain."""
