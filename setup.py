"""Package metadata. The exact versions that work together are in requirements/*.txt; see the
Makefile.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def names(file: str) -> list[str]:
    """The requirements of one file, comments left out."""
    lines = (
        line.partition("#")[0].strip()
        for line in (ROOT / "requirements" / file).read_text().splitlines()
    )
    return [line for line in lines if line]


REPORT = names("report.in")
NPU = [*REPORT, *names("npu.in")]  # torch, vLLM and Ray are MindSpeed-RL's own there
TOOLS = [*NPU, *names("tools.in")]
INSIDE = {
    f"mindspeed_qerl.{folder}": folder for folder in ("cli", "tools", "configs")
}  # the package
COMMANDS = [
    "train",
    *(file.stem.replace("_", "-") for file in sorted((ROOT / "tools").glob("*.py"))),
]

setup(
    name="mindspeed_qerl",
    version="0.1.0",
    description="GRPO + LoRA + AQN for Megatron models: a MindSpeed-RL extension, and an engine "
    "that needs no NPU",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="mindspeed_qerl contributors",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=[*find_packages(include=["mindspeed_qerl", "mindspeed_qerl.*"]), *INSIDE],
    package_dir=INSIDE,
    package_data={
        "mindspeed_qerl.ascend": ["contract.yaml"],
        "mindspeed_qerl.configs": ["**/*.yaml"],
        "mindspeed_qerl.families": ["megatron.yaml", "models.yaml"],
        "mindspeed_qerl.layout": ["launches.yaml"],
        "mindspeed_qerl.recipe": ["keys.yaml", "synonyms.yaml"],
        "mindspeed_qerl.runs": ["plots.yaml", "plots.mplstyle"],
        "mindspeed_qerl.emulation": [
            "stand_ins/**/*"
        ],  # packages of other names, for emulation.environment
    },
    entry_points={
        "console_scripts": [
            f"qerl-{command} = mindspeed_qerl.common.entry:command" for command in COMMANDS
        ],
        # does something where MINDSPEED_QERL_ROLLOUT is set (integrations/vllm.py)
        "vllm.general_plugins": ["mindspeed_qerl = mindspeed_qerl.integrations.vllm:register"],
    },
    python_requires=">=3.11",
    install_requires=names("base.in"),
    extras_require={
        "report": REPORT,
        "npu": NPU,
        "tools": TOOLS,
        "local": [
            "torch==2.13.0",
            *TOOLS,
            *names("local.in"),
        ],  # `make install` takes the locked list
        "dev": names("dev.in"),
    },
)
