"""A word-level language model as people write it: hidden states from batch to batch, gradients clipped."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--words", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--time", type=int, default=12)
parser.add_argument("--epochs", type=int, default=1000)
args = parser.parse_args()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(args.words, args.width)
        self.rnn, self.decoder = nn.LSTM(args.width, args.width, 2, dropout=0.2), nn.Linear(args.width, args.words)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return self.decoder(self.drop(output)).view(-1, args.words), hidden


source = torch.randint(args.words, (args.time * 40 + 1, args.batch_size)).to(device)
model = Model().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for epoch in range(args.epochs):
    model.train()
    total = 0.0
    hidden = tuple(torch.zeros(2, args.batch_size, args.width, device=device) for _ in range(2))
    for number, at in enumerate(range(0, source.size(0) - 1, args.time)):
        words, targets = source[at : at + args.time], source[at + 1 : at + 1 + args.time].reshape(-1)
        hidden = tuple(one.detach() for one in hidden)
        model.zero_grad()
        output, hidden = model(words, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total += loss.item()
        if number % 20 == 0:
            print(f"epoch {epoch} batch {number} loss {total / (number + 1):.3f}")
