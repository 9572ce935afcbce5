"""Why the extension exists: what upstream alone does with the same configs."""

from rehearsal import make_config, run_script


def test_upstreams_lora_sync_fails(upstream, tiny, tmp_path):
    config = make_config("qwen3_moe", *tiny("qwen3_moe"), tmp_path, npus=2, ep=2, infer_ep=2)
    config["rl_config"]["verifier_function"] = ["base_acc"]
    config["actor_config"]["save"] = str(tmp_path / "save")
    result = run_script("as_is.py", config, upstream, tmp_path)
    said = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "FINISHED"))]
    print(said)
    assert (
        result.returncode == 1 and "KeyError" in said[-1] and "vllm_weight_container.py" in said[-1]
    ), result.stdout[-2000:] + result.stderr[-2000:]
