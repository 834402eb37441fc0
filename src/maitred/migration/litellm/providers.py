"""Providers of LiteLLM by the prefix of a model's name: the API that they speak, and where.

Base URLs are public facts from the providers' own documentation (`docs` of each row). A provider that is not listed is
used where the configuration gives its URL: nearly all have an endpoint that speaks OpenAI's API.
"""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Shape = Literal["url", "openai", "anthropic", "azure", "azure_ai", "ollama", "bedrock", "vertex"]
"""How the URL of an upstream is made from the settings of a deployment; see `maitred.migration.litellm.address`."""


class Provider(Struct, frozen=True):
    """Provider of models, as its own documentation has it.

    Attributes:
        url: Where its API begins; empty: the configuration says it (`api_base`).
        key: Environment variable with its API key, as LiteLLM reads it; empty: it needs none.
        docs: Where its documentation says so.
        shape: How its URL is made.
        dialect: Dialect of its upstream.
        base: Environment variable that LiteLLM reads for `api_base`.
        why: What is different from LiteLLM's own way to it; empty: nothing.
    """

    url: str = ""
    key: str = ""
    docs: str = ""
    shape: Shape = "url"
    dialect: str = "generic"
    base: str = ""
    why: str = ""


_BY_COMPATIBLE = "It is asked by its endpoint that speaks OpenAI's API."

_OWN: dict[str, Provider] = {
    "openai": Provider(
        "https://api.openai.com/v1",
        "OPENAI_API_KEY",
        "platform.openai.com/docs/api-reference",
        "openai",
        dialect="openai",
        base="OPENAI_API_BASE",
    ),
    "anthropic": Provider(
        "https://api.anthropic.com/v1",
        "ANTHROPIC_API_KEY",
        "docs.anthropic.com/en/api/messages",
        "anthropic",
        base="ANTHROPIC_API_BASE",
    ),
    "azure": Provider(
        "",
        "AZURE_API_KEY",
        "learn.microsoft.com/azure/ai-foundry/openai/api-version-lifecycle",
        "azure",
        dialect="azure",
        base="AZURE_API_BASE",
    ),
    "azure_ai": Provider(
        "",
        "AZURE_AI_API_KEY",
        "learn.microsoft.com/azure/ai-foundry/foundry-models/concepts/endpoints",
        "azure_ai",
        dialect="azure",
        base="AZURE_AI_API_BASE",
    ),
    "bedrock": Provider(
        "https://bedrock-runtime.REGION.amazonaws.com/openai/v1",
        "AWS_BEARER_TOKEN_BEDROCK",
        "docs.aws.amazon.com/bedrock/latest/userguide/apis.html",
        "bedrock",
        why="Bedrock is asked by its endpoint that speaks OpenAI's API, with a Bedrock API key and no signature. "
        "Look whether it has this model: AWS lists them under 'endpoint availability'.",
    ),
    "vertex_ai": Provider(
        "https://LOCATION-aiplatform.googleapis.com/v1/projects/PROJECT/locations/LOCATION/endpoints/openapi",
        "VERTEX_ACCESS_TOKEN",
        "cloud.google.com/vertex-ai/generative-ai/docs/multimodal/call-vertex-using-openai-library",
        "vertex",
        why="Vertex AI is asked by its endpoint that speaks OpenAI's API. Its access tokens last an hour: renew the "
        "variable's source and reload, or use the provider gemini, whose keys last.",
    ),
    "gemini": Provider(
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
        "ai.google.dev/gemini-api/docs/openai",
        why=_BY_COMPATIBLE,
    ),
    "cohere": Provider(
        "https://api.cohere.ai/compatibility/v1",
        "COHERE_API_KEY",
        "docs.cohere.com/docs/compatibility-api",
        why=_BY_COMPATIBLE,
    ),
    "huggingface": Provider(
        "https://router.huggingface.co/v1", "HF_TOKEN", "huggingface.co/docs/inference-providers", why=_BY_COMPATIBLE
    ),
    "groq": Provider("https://api.groq.com/openai/v1", "GROQ_API_KEY", "console.groq.com/docs/openai", dialect="groq"),
    "together_ai": Provider(
        "https://api.together.xyz/v1",
        "TOGETHERAI_API_KEY",
        "docs.together.ai/docs/openai-api-compatibility",
        dialect="together",
    ),
    "hosted_vllm": Provider(
        "", "", "docs.vllm.ai/serving/openai_compatible_server", dialect="vllm", base="HOSTED_VLLM_API_BASE"
    ),
    "vllm": Provider("", "", "docs.vllm.ai/serving/openai_compatible_server", dialect="vllm"),
    "ollama": Provider(
        "http://localhost:11434/v1", "", "docs.ollama.com/openai", "ollama", dialect="ollama", base="OLLAMA_API_BASE"
    ),
    "litellm_proxy": Provider(
        "", "LITELLM_PROXY_API_KEY", "docs.litellm.ai", dialect="litellm", base="LITELLM_PROXY_API_BASE"
    ),
    "llamafile": Provider("http://127.0.0.1:8080/v1", "", "github.com/mozilla-ai/llamafile", dialect="llamacpp"),
    "lm_studio": Provider("", "", "lmstudio.ai/docs/app/api/endpoints/openai", base="LM_STUDIO_API_BASE"),
    "xinference": Provider("", "", "inference.readthedocs.io", base="XINFERENCE_API_BASE"),
    "databricks": Provider(
        "", "DATABRICKS_API_KEY", "docs.databricks.com/machine-learning/model-serving", base="DATABRICKS_API_BASE"
    ),
    "docker_model_runner": Provider(
        "http://localhost:12434/engines/v1", "", "docs.docker.com/ai/model-runner/api-reference"
    ),
}
"""Providers with something of their own."""
_COMPATIBLE_ROWS = (
    ("ai21", "https://api.ai21.com/studio/v1", "AI21_API_KEY", "docs.ai21.com"),
    ("abliteration", "https://api.abliteration.ai/v1", "ABLITERATION_API_KEY", "abliteration.ai"),
    ("aihubmix", "https://aihubmix.com/v1", "AIHUBMIX_API_KEY", "docs.aihubmix.com"),
    ("amazon_nova", "https://api.nova.amazon.com/v1", "AMAZON_NOVA_API_KEY", "nova.amazon.com/dev"),
    ("apertis", "https://api.stima.tech/v1", "STIMA_API_KEY", "docs.stima.tech"),
    ("assemblyai", "https://llm-gateway.assemblyai.com/v1", "ASSEMBLYAI_API_KEY", "assemblyai.com/docs/llm-gateway"),
    ("baseten", "https://inference.baseten.co/v1", "BASETEN_API_KEY", "docs.baseten.co/development/model-apis"),
    ("cerebras", "https://api.cerebras.ai/v1", "CEREBRAS_API_KEY", "inference-docs.cerebras.ai/resources/openai"),
    ("chutes", "https://llm.chutes.ai/v1", "CHUTES_API_KEY", "chutes.ai/docs"),
    ("clarifai", "https://api.clarifai.com/v2/ext/openai/v1", "CLARIFAI_API_KEY", "docs.clarifai.com"),
    ("compactifai", "https://api.compactif.ai/v1", "COMPACTIFAI_API_KEY", "docs.compactif.ai"),
    ("dashscope", "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY", "alibabacloud.com"),
    ("deepinfra", "https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY", "deepinfra.com/docs/openai_api"),
    ("deepseek", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY", "api-docs.deepseek.com"),
    ("featherless_ai", "https://api.featherless.ai/v1", "FEATHERLESS_AI_API_KEY", "featherless.ai/docs"),
    ("fireworks_ai", "https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY", "docs.fireworks.ai"),
    ("friendliai", "https://api.friendli.ai/serverless/v1", "FRIENDLI_TOKEN", "friendli.ai/docs"),
    ("github", "https://models.github.ai/inference", "GITHUB_API_KEY", "docs.github.com/github-models"),
    ("gmi", "https://api.gmi-serving.com/v1", "GMI_API_KEY", "docs.gmicloud.ai"),
    ("hyperbolic", "https://api.hyperbolic.xyz/v1", "HYPERBOLIC_API_KEY", "docs.hyperbolic.xyz"),
    ("lambda_ai", "https://api.lambda.ai/v1", "LAMBDA_API_KEY", "docs.lambda.ai/public-cloud/lambda-inference-api"),
    ("llamagate", "https://api.llamagate.dev/v1", "LLAMAGATE_API_KEY", "llamagate.dev/docs"),
    ("meta_llama", "https://api.llama.com/compat/v1", "LLAMA_API_KEY", "llama.developer.meta.com/docs"),
    ("minimax", "https://api.minimax.io/v1", "MINIMAX_API_KEY", "platform.minimax.io/docs"),
    ("mistral", "https://api.mistral.ai/v1", "MISTRAL_API_KEY", "docs.mistral.ai/api"),
    ("codestral", "https://codestral.mistral.ai/v1", "CODESTRAL_API_KEY", "docs.mistral.ai/api"),
    ("moonshot", "https://api.moonshot.ai/v1", "MOONSHOT_API_KEY", "platform.moonshot.ai/docs"),
    ("morph", "https://api.morphllm.com/v1", "MORPH_API_KEY", "docs.morphllm.com"),
    ("nano-gpt", "https://nano-gpt.com/api/v1", "NANOGPT_API_KEY", "docs.nano-gpt.com"),
    ("nebius", "https://api.studio.nebius.ai/v1", "NEBIUS_API_KEY", "docs.nebius.com/studio/inference"),
    ("novita", "https://api.novita.ai/v3/openai", "NOVITA_API_KEY", "novita.ai/docs/guides/llm-api"),
    ("nscale", "https://inference.api.nscale.com/v1", "NSCALE_API_KEY", "docs.nscale.com"),
    ("nvidia_nim", "https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY", "docs.api.nvidia.com/nim"),
    ("openrouter", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", "openrouter.ai/docs/quickstart"),
    ("ovhcloud", "https://oai.endpoints.kepler.ai.cloud.ovh.net/v1", "OVHCLOUD_API_KEY", "help.ovhcloud.com"),
    ("perplexity", "https://api.perplexity.ai", "PERPLEXITYAI_API_KEY", "docs.perplexity.ai"),
    ("poe", "https://api.poe.com/v1", "POE_API_KEY", "creator.poe.com/docs"),
    ("publicai", "https://api.publicai.co/v1", "PUBLICAI_API_KEY", "platform.publicai.co/docs"),
    ("sambanova", "https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY", "docs.sambanova.ai"),
    ("sarvam", "https://api.sarvam.ai/v1", "SARVAM_API_KEY", "docs.sarvam.ai"),
    ("scaleway", "https://api.scaleway.ai/v1", "SCW_SECRET_KEY", "scaleway.com/docs/generative-apis"),
    ("synthetic", "https://api.synthetic.new/openai/v1", "SYNTHETIC_API_KEY", "dev.synthetic.new/docs"),
    ("v0", "https://api.v0.dev/v1", "V0_API_KEY", "v0.app/docs/api/model"),
    ("veniceai", "https://api.venice.ai/api/v1", "VENICE_AI_API_KEY", "docs.venice.ai"),
    ("vercel_ai_gateway", "https://ai-gateway.vercel.sh/v1", "VERCEL_AI_GATEWAY_API_KEY", "vercel.com/docs/ai-gateway"),
    ("volcengine", "https://ark.cn-beijing.volces.com/api/v3", "VOLCENGINE_API_KEY", "volcengine.com/docs/82379"),
    ("wandb", "https://api.inference.wandb.ai/v1", "WANDB_API_KEY", "docs.wandb.ai/guides/inference"),
    ("xai", "https://api.x.ai/v1", "XAI_API_KEY", "docs.x.ai/docs/api-reference"),
    ("xiaomi_mimo", "https://api.xiaomimimo.com/v1", "XIAOMI_MIMO_API_KEY", "platform.xiaomimimo.com"),
    ("zai", "https://api.z.ai/api/paas/v4", "ZAI_API_KEY", "docs.z.ai/api-reference"),
)  # fmt: skip
"""Name, URL, variable of the key, and documentation of providers that speak OpenAI's API and nothing else."""
PROVIDERS: dict[str, Provider] = {
    **_OWN,
    **{name: Provider(url, key, docs) for name, url, key, docs in _COMPATIBLE_ROWS},
}

SAME_AS = {
    "text-completion-openai": "openai",
    "custom_openai": "openai",
    "openai_like": "openai",
    "azure_text": "azure",
    "anthropic_text": "anthropic",
    "bedrock_converse": "bedrock",
    "bedrock_mantle": "bedrock",
    "amazon_bedrock": "bedrock",
    "vertex_ai_beta": "vertex_ai",
    "cohere_chat": "cohere",
    "ollama_chat": "ollama",
    "text-completion-codestral": "codestral",
}
"""Other prefixes of the same providers."""

UNSUPPORTED_PROVIDERS: dict[str, str] = {
    **dict.fromkeys(
        ("sagemaker", "sagemaker_chat", "sagemaker_nova"),
        "SageMaker wants signed requests. Put a server with OpenAI's API before the endpoint, and name its URL.",
    ),
    **dict.fromkeys(
        ("aws_polly", "elevenlabs", "deepgram", "runwayml", "stability", "black_forest_labs", "fal_ai", "recraft"),
        "Images, sound and video are not served. Call this provider directly.",
    ),
    **dict.fromkeys(
        ("voyage", "jina_ai", "infinity"),
        "Embeddings and reranking of other servers are not served. Serve an embedding model with the section "
        "`encoder`, or call this provider directly.",
    ),
    **dict.fromkeys(
        ("langfuse", "humanloop", "dotprompt", "bitbucket", "gitlab", "arize_phoenix", "generic_prompt_management"),
        "Prompts of a prompt manager are not fetched. Send the prompt, or put it into a chat template.",
    ),
    **dict.fromkeys(
        ("langgraph", "manus", "ragflow", "dify", "a2a", "bedrock_agentcore", "agentcore", "pydantic_ai_agents"),
        "This is an agent, not a model. Call it directly.",
    ),
    **dict.fromkeys(
        ("github_copilot", "chatgpt"),
        "It is used by a person's subscription and login, not by an API key. Name a provider with a key.",
    ),
    "auto_router": "Declare a model that is chosen for each request: `routing.auto`, see docs/routing.md.",
    "semantic_router": "Declare a model that is chosen for each request: `routing.auto`, see docs/routing.md.",
    "triton": "Triton's own API is not spoken. Start its OpenAI-compatible front end, and name its URL.",
    "watsonx": "watsonx has an API and a login of its own. Use its model gateway, which speaks OpenAI's API, by URL.",
    "sap": "SAP AI Core has a login of its own. Put its proxy with OpenAI's API before it, and name that URL.",
    "gigachat": "GigaChat renews its tokens by a login of its own. Put a proxy before it, and name its URL.",
    "snowflake": "Name the URL of your account: `https://ACCOUNT.snowflakecomputing.com/api/v2/cortex/v1`.",
    "predibase": "Name the URL of your deployment that speaks OpenAI's API, as provider `openai`.",
    "replicate": "Replicate's predictions are not spoken. Name a provider that speaks OpenAI's API.",
    "bytez": "Bytez has an API of its own. Name a provider that speaks OpenAI's API.",
    "petals": "Petals has an API of its own. Name a provider that speaks OpenAI's API.",
    "nlp_cloud": "NLP Cloud has an API of its own. Name a provider that speaks OpenAI's API.",
    "oci": "OCI wants signed requests. Name its endpoint that speaks OpenAI's API, as provider `openai`.",
}
"""Providers that are not spoken, with what to do."""

_NAMES = (
    ("openai", ("gpt-", "o1", "o3", "o4", "chatgpt-", "text-davinci", "davinci", "babbage", "ft:gpt", "*")),
    ("openai", ("text-embedding-", "whisper-", "tts-", "dall-e-", "omni-moderation-", "text-moderation-")),
    ("anthropic", ("claude-",)),
    ("bedrock", ("anthropic.", "us.anthropic.", "eu.anthropic.", "meta.", "amazon.", "mistral.")),
    ("vertex_ai", ("gemini-",)),
    ("cohere", ("command",)),
    ("mistral", ("mistral-", "codestral-")),
    ("deepseek", ("deepseek-",)),
)
"""Beginnings of model names without a prefix, by provider."""


def split_model(model: str, provider: str = "") -> tuple[str, str]:
    """Returns the provider and the provider's name of a model.

    Args:
        model: `model` of `litellm_params`, such as ``azure/my-deployment``.
        provider: `custom_llm_provider`, which comes first; empty: the prefix says it, or else the name itself.
    """
    prefix, slash, rest = model.partition("/")
    if provider:
        return SAME_AS.get(provider, provider), rest if slash and prefix == provider else model
    if slash and (prefix in SAME_AS or prefix in PROVIDERS or prefix in UNSUPPORTED_PROVIDERS):
        return SAME_AS.get(prefix, prefix), rest
    guess = next((name for name, starts in _NAMES if _begins(model, starts)), "")
    return (guess, model) if guess else (prefix if slash else "", rest if slash else model)


def _begins(model: str, starts: Iterable[str]) -> bool:
    return any(model.startswith(start) for start in starts)
