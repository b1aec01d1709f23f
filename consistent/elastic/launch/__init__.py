"""The elastic launcher, ``python -m consistent run``: ranks may come and go while a program runs.

```
membership  the rules of who is in the world (who trains): messages received -> messages to send
leader      applies the rules in one thread, at the store's host, in the first launcher
agent       the processes of one host, on torch.distributed.elastic's own contexts
mail        messages in queues of torch's TCPStore
run         the command
```
"""
