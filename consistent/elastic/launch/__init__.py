"""The launcher of ranks that come and go: ``python -m consistent run``.

```
membership  the rules of who is in the world: messages received -> messages to send
leader      applies the rules in one thread, at the store's host, in the first launcher
agent       the processes of one host, on torch.distributed.elastic's own contexts
mail        messages in queues of torch's TCPStore
run         the command
```
"""
