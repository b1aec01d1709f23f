"""The launcher of ranks that come and go: ``python -m consistent run``.

```
membership  who is in the world, as a rule: what is heard in, what is said out
leader      the one place where it is decided: beside the store, in the first launcher
agent       the processes of one host, on torch.distributed.elastic's own contexts
mail        messages in queues of torch's TCPStore
run         the command
```
"""
