"""Paths of well-known APIs that have no route here, and what to send instead.

Clients often turn a bare 404 into another error, such as a model that is not found. So the response says what the path
is elsewhere. The paths are those of the public API references of OpenAI, Anthropic, Cohere, Google and Ollama, and of
the servers vLLM and TGI.
"""

_CHAT = "Use POST /v1/chat/completions."
_TEXT = "This server generates text and embeddings only."
_MEDIA = (
    "Models of other servers answer /v1/images/generations, /v1/images/edits, /v1/images/variations, "
    "/v1/audio/speech, /v1/audio/transcriptions and /v1/audio/translations."
)
_BATCH = "Send each request by itself, with the header x-maitred-priority: batch."
_RERANK = "This server does not rank documents. Compare embeddings of POST /v1/embeddings instead."
_BASE_URL = "Use the API of OpenAI at this server: base URL /v1, API key of this server."

ADVICE = {  # path -> advice; it also holds for what is below the path
    "/api": f"Ollama's API. {_BASE_URL}",
    "/classify": "vLLM's classification. This server has no classifiers.",
    "/generate": "TGI's generation. Use POST /v1/completions.",
    "/generate_stream": "TGI's generation. Use POST /v1/completions with stream: true.",
    "/invocations": f"SageMaker's path of inference. {_CHAT}",
    "/openai": f"Azure's path of OpenAI's API. {_BASE_URL}",
    "/ping": "SageMaker's path of health checks. Use GET /health/live.",
    "/pooling": "vLLM's pooling. Use POST /v1/embeddings.",
    "/rerank": f"Jina's and vLLM's reranking. {_RERANK}",
    "/score": f"vLLM's scoring. {_RERANK}",
    "/v1/assistants": f"OpenAI's Assistants API. {_CHAT}",
    "/v1/audio": f"OpenAI's audio API. {_MEDIA}",
    "/v1/batches": f"OpenAI's Batch API. {_BATCH}",
    "/v1/chat": f"Cohere's Chat API has this path. {_CHAT}",
    "/v1/classify": "Cohere's classification. This server has no classifiers.",
    "/v1/complete": "Anthropic's Text Completions. Use POST /v1/messages.",
    "/v1/containers": f"OpenAI's containers. {_TEXT}",
    "/v1/edits": f"OpenAI's edits. {_CHAT}",
    "/v1/embed": "Cohere's embeddings. Use POST /v1/embeddings.",
    "/v1/engines": f"OpenAI's former path with a model's name. Name it as `model` in the body. {_CHAT}",
    "/v1/evals": f"OpenAI's evaluations. {_TEXT}",
    "/v1/files": "the Files API of OpenAI or Anthropic. Put the text into the request.",
    "/v1/fine_tuning": "OpenAI's fine-tuning. Train elsewhere, and serve the result here with `maitred serve MODEL`.",
    "/v1/generate": "Cohere's generation. Use POST /v1/completions.",
    "/v1/images": f"OpenAI's image API. {_MEDIA}",
    "/v1/messages/batches": f"Anthropic's Message Batches. {_BATCH}",
    "/v1/moderations": f"OpenAI's moderation. {_TEXT}",
    "/v1/organization": "OpenAI's administration. That of this server is below /admin/v1.",
    "/v1/organizations": "Anthropic's administration. That of this server is below /admin/v1.",
    "/v1/realtime": f"OpenAI's Realtime API. {_CHAT}",
    "/v1/rerank": f"Cohere's and Jina's reranking. {_RERANK}",
    "/v1/responses/compact": "OpenAI's compaction. Send fewer items in the input of POST /v1/responses.",
    "/v1/score": f"vLLM's scoring. {_RERANK}",
    "/v1/skills": f"Anthropic's Skills API. {_TEXT}",
    "/v1/threads": f"OpenAI's Assistants API. {_CHAT}",
    "/v1/uploads": "OpenAI's uploads. Put the text into the request.",
    "/v1/vector_stores": "OpenAI's vector stores. Put what you have found into the request.",
    "/v1/videos": f"OpenAI's video API. {_TEXT}",
    "/v1beta": f"Google's Gemini API. {_BASE_URL}",
    "/v2/chat": f"Cohere's Chat API. {_CHAT}",
    "/v2/embed": "Cohere's embeddings. Use POST /v1/embeddings.",
    "/v2/rerank": f"Cohere's reranking. {_RERANK}",
}
_MOST_SEGMENTS = max(path.count("/") for path in ADVICE) + 1


def advise(path: str) -> str:
    """Returns what a path without a route is elsewhere and what to send instead; empty for an unknown path."""
    segments = path.split("/", _MOST_SEGMENTS)[:_MOST_SEGMENTS]
    while segments:
        if (advice := ADVICE.get("/".join(segments))) is not None:
            return f"That is {advice}"
        segments.pop()
    return ""
