# Look at: three lines, which global_tensor_data_parallel.py and global_tensor_model_parallel.py
# repeat with nothing changed but a placement and SBPs added. This program runs on one device.
#
#     python examples/global_tensor_basic.py

import torch

x = torch.randn(4, 5)
w = torch.randn(5, 8)
out = torch.matmul(x, w)
print(tuple(out.shape))  # (4, 8)
