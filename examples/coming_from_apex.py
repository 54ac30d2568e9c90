"""Training that used apex.amp at opt level O2: what it said stands beside what takes its place.

`python coming_from_apex.py O1` trains at another level; the loop stays as it is.
"""

import io
import sys

import torch
from torch import nn

import amptune

level = sys.argv[1] if len(sys.argv) > 1 else "O2"

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
tuned = amptune.apply(f"apex:{level}", model)
optimizer = tuned.optimizer(optimizer)

x, y = torch.randn(32, 3, 8, 8), torch.randint(4, (32,))
losses = []
for i in range(60):
    with tuned.autocast():  # O1 needs it, the other levels do nothing there
        loss = nn.functional.cross_entropy(model(x), y) / 2
    # with amp.scale_loss(loss, optimizer, delay_unscale=i % 2 == 0) as scaled_loss:
    #     scaled_loss.backward()
    tuned.scaler.scale(loss).backward()
    losses.append(2 * loss.item())
    if i % 2:
        # torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        tuned.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # optimizer.step()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()

# {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
file = io.BytesIO()
torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": tuned.scaler.state_dict()}, file
)
file.seek(0)
checkpoint = torch.load(file)
assert {tensor.dtype for tensor in checkpoint["model"].values()} == {torch.float32, torch.int64}
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
tuned.scaler.load_state_dict(checkpoint["scaler"])

tuned.undo()  # an FP32 model again, with the weights that were trained
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
