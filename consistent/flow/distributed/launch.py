"""Start a program on many ranks: torchrun under OneFlow's name."""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
