"""Write docstrings with the fine-tuned model: ``python write.py RUN SIGNATURE ...``."""

import sys

import torch
import work
from safetensors.torch import load_file

from clients.models import gpt


def docstring(model: torch.nn.Module, signature: str) -> str:
    """The most probable docstring, byte by byte."""
    tokens = list(work.prompt_of(signature).encode())
    start = len(tokens)
    while len(tokens) < work.CONTEXT:
        with torch.no_grad():
            token = int(model(torch.tensor([tokens]))[0, -1].argmax())
        if token == work.END:
            break
        tokens.append(token)
    return bytes(tokens[start:]).decode(errors="replace")


def main(run: str, signatures: list[str]) -> None:
    """Print a docstring for each signature."""
    model = gpt(context=work.CONTEXT, layers=2, heads=4, width=96)
    model.load_state_dict(load_file(f"{run}/model.safetensors"), strict=False)
    for signature in signatures:
        print(f"def {signature}:")
        print(f'    """{docstring(model, signature)}"""')


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
