"""A segmentation script as people write it: validation within the epoch, a scaler, a plateau schedule."""

import torch, logging
import torch.nn as nn
from torch import optim
from torch.utils.data import DataLoader, random_split, TensorDataset
from pathlib import Path

dir_checkpoint = Path("./checkpoints/")


class UNet(nn.Module):
    def __init__(s):
        super().__init__()
        s.d = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        s.p = nn.MaxPool2d(2)
        s.m = nn.Conv2d(8, 8, 3, padding=1)
        s.u = nn.Upsample(scale_factor=2)
        s.o = nn.Conv2d(16, 2, 1)

    def forward(s, x):
        a = s.d(x)
        b = s.u(s.m(s.p(a)))
        return s.o(torch.cat([a, b], 1))


def train_model(model, device, epochs=20, batch_size=4, amp=True):
    data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(2, (64, 32, 32)))
    n = int(0.1 * 64)
    train_set, val_set = random_split(data, [64 - n, n])
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=batch_size)
    optimizer = optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler(device.type, enabled=amp)
    criterion = nn.CrossEntropyLoss()
    global_step = 0
    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        for images, true_masks in train_loader:
            images = images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            true_masks = true_masks.to(device)
            with torch.autocast(
                device.type, enabled=amp, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16
            ):
                masks_pred = model(images)
                loss = criterion(masks_pred, true_masks)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            global_step += 1
            epoch_loss += loss.item()
            if global_step % 5 == 0:
                model.eval()
                with torch.no_grad():
                    for i, t in val_loader:
                        model(i.to(device))
                model.train()
                scheduler.step(0.5)
        dir_checkpoint.mkdir(parents=True, exist_ok=True)
        sd = model.state_dict()
        torch.save(sd, str(dir_checkpoint / f"c{epoch}.pth"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet().to(memory_format=torch.channels_last).to(device)
    try:
        train_model(model, device)
    except torch.cuda.OutOfMemoryError:
        raise
