"""When a rank waits in vain, all ranks raise one message, which says where each of them is."""
