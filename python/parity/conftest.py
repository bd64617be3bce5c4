"""One thread for both: the sweeps are about numbers."""

import rapt
import torch

torch.set_num_threads(1)
rapt.set_num_threads(1)
