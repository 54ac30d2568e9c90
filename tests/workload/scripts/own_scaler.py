"""A loop with a scaler class, a loader class and groups of its own, as people write it."""

import torch
from torch import nn
from contextlib import suppress
from functools import partial


class NativeScaler:
    def __init__(s, dev):
        s._scaler = torch.amp.GradScaler(dev)

    def __call__(s, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, need_update=True):
        s._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                s._scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, clip_grad)
            s._scaler.step(optimizer)
            s._scaler.update()


dev = "cuda" if torch.cuda.is_available() else "cpu"
m = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
).to(dev)
wd = [p for n, p in m.named_parameters() if p.ndim > 1]
no = [p for n, p in m.named_parameters() if p.ndim <= 1]
opt = torch.optim.AdamW([{"params": no, "weight_decay": 0.0}, {"params": wd, "weight_decay": 0.05}], lr=1e-3)
scaler = NativeScaler(dev)
amp = partial(torch.autocast, device_type=dev, dtype=torch.float16)


class Loader:
    def __init__(s):
        s.l = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(
                torch.randint(256, (320, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (320,))
            ),
            16,
            shuffle=True,
        )

    def __iter__(s):
        for x, y in s.l:
            yield x.to(dev).float().div(255).sub(0.5), y.to(dev)

    def __len__(s):
        return len(s.l)


dl = Loader()
n = 0
for e in range(300):
    m.train()
    opt.zero_grad()
    for i, (x, y) in enumerate(dl):
        up = (i + 1) % 2 == 0
        with amp():
            loss = nn.functional.cross_entropy(m(x), y, label_smoothing=0.1) / 2
        scaler(loss, opt, clip_grad=1.0, parameters=m.parameters(), need_update=up)
        if not up:
            continue
        n += 1
        opt.zero_grad()
        for g in opt.param_groups:
            g["lr"] = 1e-3 * (1 - n / 10000)
