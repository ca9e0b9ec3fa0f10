"""One rank of a deployed site, as its agent starts it: ``python -m`` runs this."""

import json
import logging
import sys
import tomllib
from dataclasses import replace
from functools import partial

import torch

from clients.models.model_pool import ModelPool
from clients.privacy.public_moments import standardised
from clients.privacy.standardise import Statistics
from clients.ranks.control import RankInputs, Start
from clients.ranks.peers import Peers
from clients.ranks.placing import can_compile, place_
from clients.training import rank as process
from clients.training.local_federation import SiteData
from clients.training.private_steps import PrivateTraining
from clients.training.trainer import TorchTrainer
from deploy.wiring import parts as wiring
from deploy.wiring.job_data import load_data
from federation.ids import SiteId
from federation.job import job_file
from federation.job.spec import JobSpec


def main() -> None:
    """Serve the agent until it is gone."""
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    inherited = RankInputs.of(sys.argv[1:])
    process.serve(
        inherited,
        build=_build,
        device=lambda start: str(
            process.device_of(job_file.loads(start.job), inherited.rank)
        ),
    )


def _build(start: Start, peers: Peers) -> TorchTrainer:
    job = job_file.loads(start.job)
    torch.set_num_threads(job.training.threads)
    job = replace(job, training=replace(job.training, device=str(peers.device)))
    site = SiteId(start.site)
    train, held_out = standardised(job, _data(job, site, start))
    if start.statistics:
        statistics = Statistics.parse(json.loads(start.statistics))
        train, held_out = statistics.apply(train), statistics.apply(held_out)
    compiled = start.compile and can_compile(peers.device)
    return TorchTrainer(
        job,
        site,
        pool=ModelPool(
            job, partial(place_, peers=peers, compiled=compiled), starts=False
        ),
        train=train,
        held_out=held_out,
        private=_private(start),
        peers=peers,
        seed=int(start.seed, 16) if start.seed else None,
    )


def _private(start: Start) -> PrivateTraining | None:
    if not start.clipping:
        return None
    return PrivateTraining(
        clip_norm=start.clip_norm,
        noise_multiplier=start.noise_multiplier,
        clipping=start.clipping,
    )


def _data(job: JobSpec, site: SiteId, start: Start) -> SiteData:
    own = tomllib.loads(start.data)
    if own["source"]:
        return load_data(own["source"], own["options"])
    return wiring.deal_part(job, site)


if __name__ == "__main__":
    main()
