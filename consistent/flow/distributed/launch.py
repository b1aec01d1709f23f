"""Start a program on many ranks: torchrun under the documents' name.

python -m consistent.flow.distributed.launch --nproc_per_node 2 program.py
"""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
