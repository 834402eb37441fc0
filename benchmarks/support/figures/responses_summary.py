"""Figures of the Responses API and of an evaluation harness for the documentation, from the result files."""

from benchmarks.support.report import bar_of, load_result


def render() -> str:
    """Returns the figures as Markdown."""
    return "\n\n".join([_conversations(), _websockets(), _fuzz(), _lm_eval(), _prompt_logprobs()]) + "\n"


def _conversations() -> str:
    result = load_result("conversations")
    figures, real = result["figures"]["digest"], result["figures"]["real"]
    attempts = figures["attempts"]
    return (
        f"**Stored conversations** — `{result['command']}`: {figures['conversations']:,} conversations, "
        f"{figures['turns']:,} turns over two gateways on one PostgreSQL and one Redis, each turn at another gateway "
        f"than the one before, with {figures['kills']} kills -9. {bar_of(result, 'without their context'):.0f} answers "
        f"lack a turn, {bar_of(result, 'another tenant'):.0f} ids are shown to another tenant, the store has "
        f"{figures['store']['responses']:,} responses of {figures['store']['mean_bytes']:.0f} bytes, and nothing is "
        f"held at the end. Kills cut {attempts['cut'] + attempts.get('found in the store', 0):,} requests, of which "
        f"clients found {attempts.get('found in the store', 0)} answers in the store; "
        f"{bar_of(result, 'billed twice'):.0f} turns are billed twice. On the real engine {real['turns']} turns: "
        f"{bar_of(result, 'answers that differ'):.0f} answers differ from those to the conversation as a whole."
    )


def _websockets() -> str:
    result = load_result("websockets")
    many, first, soak = (result["figures"][name] for name in ("many", "first_token", "soak"))
    return (
        f"**WebSockets** — `{result['command']}`: {many['sockets']:,} sockets at once. A budget that runs out between "
        f"turns: {many['spent_usd']:.6f} of {many['budget_usd']:g} USD spent, "
        f"{bar_of(result, 'overspend'):.0f} overspent; "
        f"{bar_of(result, 'turns of the engine that are not billed'):.0f} turns are unbilled, with "
        f"{many['turns'].get('cut', 0)} cut after their first text. Time to the first token of a second turn, p50: "
        f"{first['ttft_ms']['websocket']:.1f} ms, over HTTP {first['ttft_ms']['http']:.1f} ms. After "
        f"{soak['sockets']:,} more sockets, {soak['turns'].get('cut', 0)} of them with an abrupt end, "
        f"{bar_of(result, 'soak: held'):.0f} leases, places and credits and {bar_of(result, 'soak: more blocks'):.0f} "
        f"blocks are held, and {bar_of(result, 'soak: more process_open_fds'):.0f} more descriptors are open."
    )


def _fuzz() -> str:
    result = load_result("responses_fuzz")
    figures = result["figures"]
    whole = sum(count for kind, count in figures["answers"].items() if kind.startswith("200"))
    return (
        f"**Requests at random** — `{result['command']}`: {figures['requests']:,} requests to the Responses API, most "
        f"of them wrong somewhere. {whole:,} are answered and the others refused; "
        f"{bar_of(result, 'server errors'):.0f} server errors, {bar_of(result, 'hangs'):.0f} hang, "
        f"{bar_of(result, 'beside the description'):.0f} answers are not as the server's own `openapi.json` says."
    )


def _lm_eval() -> str:
    result = load_result("lm_eval")
    figures = result["figures"]
    differences = figures["largest_difference"]
    return (
        f"**lm-evaluation-harness** — `{result['command']}`, version {figures['harness']}, the bundled model by its "
        f"`local-completions` and by its `hf`: log-probabilities of {figures['continuations']} continuations differ by "
        f"at most {differences['choice']:.1e}, those of {figures['documents']} whole texts by "
        f"{differences['rolling']:.1e}; "
        f"{bar_of(result, 'generated texts'):.0f} of {figures['documents']} greedy texts differ."
    )


def _prompt_logprobs() -> str:
    result = load_result("prompt_logprobs")
    models = result["figures"]
    most = {head: max(figures["over_without"].values()) for head, figures in models.items()}
    return (
        f"**Log-probabilities of prompts** — `{result['command']}`: {models['a twelfth']['prompt_tokens']} tokens, "
        f"over the same prefill without them: at most {most['a twelfth']:.2f} times as long where the head is a "
        "twelfth of the model's work, as in models of seven billion parameters, and "
        f"{most['a third']:.2f} times where it is a third."
    )
