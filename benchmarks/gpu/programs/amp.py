"""A loop with float16, a gradient scaler, batches copied to the device, a validation pass and a checkpoint an epoch."""

import io
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 10)).to(
    device
)
data = TensorDataset(torch.randn(4096, 1024), torch.randint(0, 10, (4096,)))
train = DataLoader(
    data, batch_size=128, shuffle=True, num_workers=2, pin_memory=device == "cuda", persistent_workers=True
)
held_out = DataLoader(data, batch_size=512)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
steps = 0
for _ in range(4):
    model.train()
    for inputs, targets in train:
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        steps += 1
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in held_out)
    torch.save(model.state_dict(), io.BytesIO())
print(json.dumps({"steps": steps, "step_ms": None}))
