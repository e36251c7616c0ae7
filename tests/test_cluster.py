"""docs/cluster/: each file starts two nodes of one rank, here by stand-ins for ssh, Slurm and SkyPilot, and
they train as one node does."""
import os
import subprocess

import pytest
import yaml

import fork_server
from helpers import ROOT, TOY, free_port, look, run_cli

SETTINGS = TOY | dict(ITERATIONS="6", TRAIN_LOG_EVERY="1", COUNT_ORDERS="0",
                      COUNT_WORDS="0", OMP_NUM_THREADS="1")
# A host is this machine; options before it are left out
SSH = '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec bash -c "$*"\n'
SRUN = """#!/bin/bash
shift       # --kill-on-bad-exit=1
for SLURM_NODEID in 0 1; do
    export SLURM_NODEID
    "$@" & jobs+=($!)
done
wait "${jobs[0]}" && wait "${jobs[1]}"
"""
SKY = """#!/bin/bash
for SKYPILOT_NODE_RANK in 0 1; do
    export SKYPILOT_NODE_RANK
    bash run.sh & jobs+=($!)
done
wait "${jobs[0]}" && wait "${jobs[1]}"
"""


@pytest.fixture(scope="module")
def alone(tiny_data, tmp_path_factory):
    """The losses of one rank."""
    home = tmp_path_factory.mktemp("alone")
    (home / "data").symlink_to(tiny_data / "data")
    done = run_cli(home, "--run-id=alone", "--matrix-lr=0.02", env=SETTINGS)
    assert done.code == 0, done.err
    return look(home / "logs/alone").losses


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tiny_data, tmp_path):
    """A checkout with the toy data, an interpreter and the stand-ins, on a path with a space."""
    home = tmp_path / "train gpt"
    (home / ".venv/bin").mkdir(parents=True)
    (home / "docs").mkdir()
    (home / "data").mkdir()
    for path in [*ROOT.glob("data/*.py"), *(tiny_data / "data").iterdir()]:
        (home / "data" / path.name).symlink_to(path)
    for name in ("train_gpt.py", "tools", "records"):
        (home / name).symlink_to(ROOT / name)
    (home / "docs/cluster").symlink_to(ROOT / "docs/cluster")
    program(home / ".venv/bin/python", f'#!/bin/sh\nexec "{fork_server.start()}" "$@"\n')
    (tmp_path / "bin").mkdir()
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", "#!/bin/sh\necho localhost\necho other\n")):
        program(tmp_path / "bin" / name, text)
    return home


def commands(home, port):
    """{name: (words, environment)} of what starts both nodes."""
    sky = yaml.safe_load((ROOT / "docs/cluster/sky.yaml").read_text())
    parsed = subprocess.run(["bash", "-n"], input=sky["setup"].encode())
    assert sky["num_nodes"] == 2 and parsed.returncode == 0
    run = sky["run"].replace("29500", port)
    assert run != sky["run"]
    (home / "run.sh").write_text(run)
    program(home / "sky", SKY)
    flags = ["--run-id=nodes", "--matrix-lr=0.02"]
    slurm = dict(SLURM_SUBMIT_DIR=str(home), SLURM_JOB_NODELIST="node[1-2]", SLURM_JOB_ID=port,
                 SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="1")
    cloud = dict(SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="1", SKYPILOT_NODE_IPS="localhost\nother",
                 ARGS=" ".join(flags))
    return {"ssh": (["docs/cluster/ssh.sh", "localhost other", *flags], dict(GPUS="1", PORT=port)),
            "slurm": (["bash", ROOT / "docs/cluster/slurm.sbatch", *flags], slurm), "sky": (["./sky"], cloud)}


@pytest.mark.parametrize("name", ["ssh", "slurm", "sky"])
def test_two_nodes_train_as_one(checkout, alone, name):
    words, more = commands(checkout, free_port())[name]
    env = {key: os.environ[key] for key in ("HOME",) if key in os.environ}
    env |= SETTINGS | more | {"PATH": f"{checkout.parent}/bin:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("limits: at most 6 steps") == 2        # each node has a plan
    run = look(checkout / "logs/nodes")
    assert "world_size:2" in run.log and run.result["world_size"] == 2
    assert run.losses == pytest.approx(alone, abs=2e-4)
    assert name != "ssh" or "localhost: world_size:2" in done.stdout, done.stdout


def test_ssh_says_that_a_node_failed(checkout):
    env = {"PATH": f"{checkout.parent}/bin:{os.environ['PATH']}"}
    program(checkout.parent / "bin/ssh", "#!/bin/sh\n[ \"$2\" = host1 ]\n")
    words = [checkout / "docs/cluster/ssh.sh", "host1 host2", "--preset=golf"]
    assert subprocess.run(words, env=env, timeout=60).returncode == 1
    assert subprocess.run([*words[:1], "host1"], env=env, timeout=60).returncode == 0
    program(checkout.parent / "bin/ssh", "#!/bin/sh\n[ \"$2\" = host2 ] || exec sleep 300\nexit 2\n")
    assert subprocess.run(words, env=env, timeout=60).returncode == 1       # host1 does not wait for it
    shown = subprocess.run(words[:1], env=env, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 2 and 'docs/cluster/ssh.sh "host1 host2"' in shown.stdout
