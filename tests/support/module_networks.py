"""What the networks of our Terraform modules let out, by port."""

import re
from collections.abc import Sequence
from pathlib import Path

_MODULES = Path(__file__).parents[2] / "deploy" / "terraform"


def ports_out() -> Sequence[set[int]]:
    """Ports that machines of a site may connect to, on AWS and on Google Cloud."""
    aws, gcp = (
        (_MODULES / cloud / "network" / "main.tf").read_text()
        for cloud in ("aws", "gcp")
    )
    (aggregator,) = {
        re.findall(r'"aggregator_port" \{[^}]*default\s*= (\d+)', text)[0]
        for text in (aws, gcp)
    }
    rules = re.findall(r'_egress_rule" "(\w+)" \{(.*?)\n\}', aws, re.DOTALL)
    spans = [re.findall(r"(?:from|to)_port\s*= (\S+)", rule) for _, rule in rules]
    assert all(low == high for low, high in spans)
    (allowed,) = re.findall(r'direction\s*= "EGRESS"[^}]*allow \{[^}]*\}', gcp)
    lists = [[low for low, _ in spans], re.findall(r"ports\s*= \[(.*)\]", allowed)]
    named = {"var.aggregator_port": aggregator}
    return [
        {
            int(named.get(word, word))
            for word in re.findall(r"var\.\w+|\d+", " ".join(words))
        }
        for words in lists
    ]
