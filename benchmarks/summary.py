"""Figures of the documentation, rendered from the result files, so that no number is typed by hand.

``python -m benchmarks summary`` puts all of them between the markers in docs/benchmarks.md, and a few in README.md.
"""

import re
import sys
import textwrap
from pathlib import Path

from benchmarks.support.figures import (
    fair_summary,
    gateways_summary,
    responses_summary,
    rival_summary,
    routing_summary,
    scaling_summary,
)
from benchmarks.support.report import bar_of, load_result

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
_NO_BREAK = "\N{NO-BREAK SPACE}"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def main() -> int:
    """Writes the figures into both pages."""
    for page, figures in ((README, render_short()), (PAGE, render())):
        text = page.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        page.write_text(f"{head}{BEGIN}\n{figures}{END}{tail}")
    return 0


def render_short() -> str:
    """The figures that stand in the README, as Markdown."""
    return _with_current_commands("\n".join(gateways_summary.render()))


def render() -> str:
    """All figures, as Markdown for a page in docs."""
    fair, routing = fair_summary.render(), routing_summary.render()
    text = "\n".join(
        [
            *(_first_run(), _users(), _loads(), *fair, _throughput(), _rest(), rival_summary.render()),
            *gateways_summary.render(),
            *(routing, scaling_summary.render(), _accounts(), responses_summary.render(), _retries(), _tester()),
        ]
    )
    return _with_current_commands(text).replace("](benchmarks/", "](../benchmarks/")


def _with_current_commands(text: str) -> str:
    """The text with each command as it is typed now, whatever it was when its figures were measured, in short lines."""
    text = re.sub(r"python -m benchmarks\.(\w+)", r"python -m benchmarks \1", text)
    text = re.sub(r"`[^`\n]+`", lambda code: code[0].replace(" ", _NO_BREAK), text)
    lines = (line if line.startswith(("|", "!")) else textwrap.fill(line, 120) for line in text.split("\n"))
    return "\n".join(lines).replace(_NO_BREAK, " ")


def _first_run() -> str:
    result = load_result("first_run")
    machine, figures = result["machine"], result["figures"]
    return (
        f"**The first run** — `{result['command']}`: a clone without an environment, no caches, {machine['cores']} "
        f"cores ({machine['cpu']}) shared with other work. `make serve` downloads {figures['packages']} packages, "
        f"{figures['downloaded_mb']:.0f} MB, and has installed them after {figures['installed_s']:.0f} s; "
        f"{figures['served_s']:.0f} s later, with weights converted and kernels compiled, {figures['model']} answers: "
        f"“{figures['answer']}”\n"
    )


def _users() -> str:
    result = load_result("users")
    machine = result["machine"]
    lines = [
        f"**Users at once** — `{result['command']}`, bundled model, client, gateway and engine together on "
        f"{machine['cores']} cores ({machine['cpu']}). Every answer complete, all KV blocks free at the end. Times in "
        "milliseconds, p50 / p95 / p99; memory is the peak of resident memory, gateway + engine.",
        "",
        "| users | output tokens/s | prompt tokens/s | time to first token | between tokens | memory |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for users, figures in result["figures"]["by_users"].items():
        memory = figures["memory_mib"]
        lines.append(
            f"| {users} | {figures['output_tokens_per_s']:,.0f} | {figures['prompt_tokens_per_s']:,.0f} "
            f"| {_times(figures['ttft_s'])} | {_times(figures['itl_s'])} "
            f"| {memory['gateway']:.0f} + {memory['engine']:.0f} MiB |"
        )
    return "\n".join([*lines, "", "![The same as a plot](benchmarks/results/users.svg)", ""])


def _loads() -> str:
    result = load_result("load")
    knee, loads = result["figures"]["knee"], result["figures"]["loads"]
    good = knee["spec"]["objectives"]
    lost = sum(load["summary"]["requests"] - load["summary"]["outcomes"]["complete"] for load in loads.values())
    lines = [
        f"**Open loops and conversations** — `{result['command']}`, the same machine. A good answer has its first "
        f"token within {good['ttft_s']:g} s and each further one within {good['tpot_s'] * 1e3:.0f} ms on average; "
        f"{good['attainment']:.0%} must be good. The knee is at **{knee['knee_per_s']:.2f} requests per second**. "
        f"Answers lost or cut: {lost}. p50 / p95 / p99 in milliseconds, from when a request was due.",
        "",
        "| load | requests/s | output tokens/s | time to first token | between tokens | good | prompt from cache |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, load in loads.items():
        summary = load["summary"]
        cached = summary["cached_tokens"] / summary["prompt_tokens"]
        lines.append(
            f"| {name} | {summary['requests_per_s']:.2f} | {summary['output_tokens_per_s']:,.0f} "
            f"| {_times(summary['ttft'])} | {_times(summary['itl'])} | {summary['attainment']:.1%} | {cached:.0%} |"
        )
    return "\n".join([*lines, ""])


def _accounts() -> str:
    alone, shared, kills = load_result("overspend"), load_result("overspend_shared"), load_result("ledger_kills")
    many, cost = load_result("tenants"), load_result("gateway_cost")
    one, two, away = alone["figures"]["spend"], shared["figures"]["spend"], shared["figures"]["outage-0"]
    tenants, rss, start_s = many["figures"], many["figures"]["rss_mib"], many["figures"]["start_s"]
    endings = kills["figures"]["endings_during_the_kills"]
    sentences = [
        f"**Accounts** — `{alone['command']}`: {one['requests']:,} requests of 64 callers who leave, fail and are cut, "
        f"with {one['kills']} kills of the gateway: {one['spent_usd']:.6f} of {one['budget_usd']:g} USD spent, "
        f"{bar_of(alone, 'overspend'):.0f} overspent, {bar_of(alone, 'still reserved'):.0f} still reserved.",
        f"Two gateways on one Redis and one PostgreSQL: {two['requests']:,} requests, {two['kills']} kills, "
        f"{two['spent_usd']:.6f} of {two['budget_usd']:g} USD; then Redis killed and started empty: "
        f"{away['overshoot_share']:.1%} overshoot, normal {away['normal_after_s']:.1f} s after it was back.",
        f"`{kills['command']}`: {kills['figures']['kills']} kills -9 in mid-stream; of {endings['whole']} answers that "
        f"were whole, {bar_of(kills, 'missing'):.0f} are missing in the ledger and {bar_of(kills, 'twice'):.0f} billed "
        "twice.",
        f"`{many['command']}`: {tenants['loaded']['keys']:,} keys of {tenants['loaded']['tenants']:,} tenants take "
        f"{rss['all'] - rss['none']:.0f} MiB and {start_s['all'] - start_s['none']:.1f} s more to start; a revoked key "
        f"works for {tenants['revoked_s']['most']:.2f} s at most.",
        f"`{cost['command']}`: identity, limits and ledger add {cost['figures']['added_us']['median']:.0f} µs "
        f"({cost['figures']['added_share']:.0%}) of processor time to a request that takes "
        f"{cost['figures']['nothing']['cpu_us']:,.0f} without them; a key that is not known costs "
        f"{cost['figures']['unknown key']['cpu_us']:.0f} µs.",
    ]
    return " ".join(sentences) + "\n"


def _retries() -> str:
    result = load_result("retries")
    lines = [
        f"**What hints save** — `{result['command']}`: callers who share a key that is used up, each with the official "
        "client as it comes, calling until they have their answers; with the hints of a refusal, and with these taken "
        "out. Requests that reach the gateway for every answer, and calls of the client that got one.",
        "",
        "| key | requests per answer | without hints | calls answered | without hints |",
        "|---|--:|--:|--:|--:|",
    ]
    figures = dict(result["figures"])
    quota = figures.pop("budget used up")
    for name, group in figures.items():
        hinted, bare = group["with_hints"], group["without"]
        lines.append(
            f"| {name} | {hinted['requests_per_answer']:.1f} | {bare['requests_per_answer']:.1f} "
            f"| {hinted['answered_share']:.0%} | {bare['answered_share']:.0%} |"
        )
    calls = f"{quota['with_hints']['requests_per_call']:.0f} | {quota['without']['requests_per_call']:.0f}"
    return "\n".join([*lines, f"| budget used up (requests per call) | {calls} | – | – |", ""])


def _tester() -> str:
    result, client = load_result("tester"), load_result("load_client")
    cost, compared = result["figures"]["cost"], result["figures"]["compare"]
    unix, tcp = cost["unix socket"], cost["tcp"]
    truth = max(bar["measured"] for bar in result["bars"] if "what was done" in bar["name"])
    false = sum(any(row[0] in ("worse", "better") for row in rows.values()) for rows in compared["same"])
    found = sum(rows["ttft_mean"][0] == "worse" for rows in compared["slower"])
    sentences = [
        f"**The load tester itself** — `{result['command']}`, against a scripted server that notes when it sent each "
        f"event. Every percentile of 1,000 streams is within {truth:.0%} of what is tolerated (3 % or 2 ms).",
        f"{cost['streams']:,} streams, with a core each for server and tester: over a Unix socket "
        f"{unix['tokens_per_s_each_while_all_open']:.1f} tokens/s for each, {unix['cpu_us_per_event']:.1f} µs of "
        f"processor time per event, {unix['tester']['peak_memory_bytes'] / 2**20:.0f} MiB; over TCP, where both cores "
        f"are full, {tcp['tokens_per_s_each_while_all_open']:.1f} tokens/s. Events lost: "
        f"{unix['events_lost'] + tcp['events_lost']} of {unix['events'] + tcp['events']:,}.",
        f"Of {len(compared['same'])} comparisons of a server with itself, {false} found a difference; 10 % more time "
        f"to the first token was found in {found} of {len(compared['slower'])}.",
        f"`{client['command']}`: an event costs {client['figures']['us_per_event']['maitred']:.1f} µs, "
        f"{client['figures']['aiohttp_over_ours']:.1f}× as much with aiohttp, "
        f"{client['figures']['httpx_over_ours']:.1f}× with httpx.",
    ]
    return " ".join(sentences) + "\n"


def _times(seconds: dict[str, float]) -> str:
    return " / ".join(f"{seconds[rank] * 1e3:,.0f}" for rank in ("p50", "p95", "p99"))


def _throughput() -> str:
    result = load_result("throughput")
    lines = [
        f"**Engine against `transformers`** — `{result['command']}`, fp32, {result['figures']['threads']} threads, "
        "output tokens per second, interleaved in one run. *One* is `generate` one request at a time, *static* is "
        "`generate` over all as one batch. The last column is the time of the matrix products alone "
        "(`F.linear`) over that of a whole decode step of the engine.",
        "",
        "| model | requests at once | one | static | maitred | over one | over static | products / step |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for shape in ("bundled", "qwen2.5-0.5b"):
        for concurrency, figures in result["figures"].get(shape, {}).items():
            ratios = (figures["engine_over_one"], figures["engine_over_static"])
            lines.append(
                f"| {shape} | {concurrency} | {figures['one_tokens_per_s']:,.0f} "
                f"| {figures['static_tokens_per_s']:,.0f} | {figures['engine_tokens_per_s']:,.0f} "
                f"| {ratios[0]:.1f}× | {ratios[1]:.1f}× | {figures['floor_over_step']:.2f} |"
            )
    return "\n".join([*lines, ""])


def _rest() -> str:
    prefix, disconnects, failover = load_result("prefix"), load_result("disconnects"), load_result("failover")
    shared = "; ".join(
        f"{shape}: {figures['off_s']:.2f} s → {figures['on_s']:.2f} s ({figures['off_over_on']:.1f}×, "
        f"{figures['hit_rate']:.1%} of prompt tokens found)"
        for shape, figures in prefix["figures"].items()
    )
    figures, killed = disconnects["figures"], failover["figures"]
    return "\n".join(
        [
            f"**Shared prefix** — `{prefix['command']}`, 32 requests at once that begin with the same 512 tokens, "
            f"cold: {shared}.",
            "",
            f"**Clients that leave** — `{disconnects['command']}`: {figures['left_before_the_end']} of "
            f"{figures['disconnects']} clients hung up before their answer was complete; 0 KV blocks, 0 sequences "
            f"and 0 requests were left, and all {figures['patient_answers']} answers of the others were complete.",
            "",
            f"**Engines killed** — `{failover['command']}`: one of {killed['engines']} killed {killed['kills']} times "
            f"under {killed['streams']} streams. {killed['streams_that_moved']:,} streams went on elsewhere, "
            f"{len(killed['differing'])} differ from the undisturbed run by a token; the longest pause was longer by "
            f"{killed['added_gap_s']['p50']:.2f} / {killed['added_gap_s']['p99']:.2f} s (p50 / p99).",
            "",
            _chaos(),
            "",
            _attacks(),
        ]
    )


def _chaos() -> str:
    result = load_result("chaos")
    figures = result["figures"]
    own, scripted = figures["models"].values()
    troubles = sum(map(len, figures["played"].values()))
    return (
        f"**Trouble** — `{result['command']}`: {figures['seconds']:.0f} s in which engines and upstream servers are "
        f"killed, stopped, slowed and made to flap, and servers send faults and stale metrics, {troubles} times. "
        f"Of {own['requests']:,} requests to the engines {own['whole_share']:.1%} were answered whole, of "
        f"{scripted['requests']:,} to the servers {scripted['whole_share']:.1%}; the others got an explicit error. "
        f"{bar_of(result, 'answers different'):.0f} differ, {bar_of(result, 'cut silently'):.0f} were cut silently, "
        f"{bar_of(result, 'answers hanging'):.0f} hung, {bar_of(result, 'not whole and were charged'):.0f} were "
        f"charged without being whole; {bar_of(result, 'held at the end'):.0f} requests, leases, slots and blocks were "
        f"held {figures['settled_s']:.1f} s after the end."
    )


def _attacks() -> str:
    result = load_result("attacks")
    figures = result["figures"]
    lost = sum(sum(attack["lost"].values()) for attack in figures.values())
    grown = max(max(attack["growth_mib"].values(), default=0.0) for attack in figures.values())
    lines = [
        f"**Attacks** — `{result['command']}`: what a victim sees while one stranger, or another team of its own "
        f"organisation, attacks a server with the settings that it comes with: the median time to first token alone "
        f"and during each attack, in turns, on {result['machine']['cores']} cores, attacker included. {lost} answers "
        "of the victim were lost, nothing was left in flight, queued, leased or in the KV cache, and no process grew "
        f"by more than {grown:.0f} MiB.",
        "",
        "| attack | alone, ms | during, ms | ratio |",
        "|---|--:|--:|--:|",
    ]
    for name, attack in figures.items():
        times = f"{attack['alone_s'] * 1e3:.0f} | {attack['during_s'] * 1e3:.0f}"
        lines.append(f"| {name} | {times} | {attack['ratio']:.2f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
