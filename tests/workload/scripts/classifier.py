"""An image classifier as people write it: loaders, epochs, validation, a schedule, a log, the best checkpoint."""

import argparse
import os
import shutil

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--size", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--samples", type=int, default=320)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--resnet", action="store_true")
parser.add_argument("--out", default="out")
args = parser.parse_args()


def small(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def accuracy(model, loader, device):
    model.eval()
    right = count = 0
    with torch.no_grad():
        for images, labels in loader:
            right += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
            count += len(labels)
    return right / count


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.randn(args.samples, 3, args.size, args.size)
    data = TensorDataset(images, torch.randint(10, (args.samples,)))
    train = DataLoader(data, args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers, pin_memory=True)
    val = DataLoader(data, args.batch_size)
    if args.resnet:
        import torchvision

        model = torchvision.models.resnet18(num_classes=10)
    else:
        model = small(args.width)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    criterion = nn.CrossEntropyLoss()
    if os.path.isdir(args.out):
        shutil.rmtree(args.out)
    os.makedirs(args.out)
    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        for step, (inputs, labels) in enumerate(train):
            inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        schedule.step()
        now = accuracy(model, val, device)
        with open(os.path.join(args.out, "log.txt"), "a") as log:
            log.write(f"{epoch} {now}\n")
        if now >= best:
            best = now
            torch.save(model.state_dict(), os.path.join(args.out, "best.tmp"))
            os.replace(os.path.join(args.out, "best.tmp"), os.path.join(args.out, "best.pt"))
    print("best", best)


if __name__ == "__main__":
    main()
