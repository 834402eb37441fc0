"""Settings of LiteLLM that become no setting of ours: why nothing is lost, or what to do.

Each table is of one section of its file; the settings that do become one of ours are in `deployment` and `settings`.
"""

from typing import NamedTuple

from maitred.migration.report import KeyFate
from maitred.migration.source_keys import SourceKey


class Note(NamedTuple):
    """Fate of a setting of theirs, with the reason or what to do."""

    fate: KeyFate
    text: str


def _ignore(text: str, *names: str) -> dict[str, Note]:
    return dict.fromkeys(names, Note(KeyFate.HARMLESS, text))


def _refuse(text: str, *names: str) -> dict[str, Note]:
    return dict.fromkeys(names, Note(KeyFate.UNSUPPORTED, text))


_CALLBACKS = (
    "Nothing is sent to loggers of others. Traces go to any OpenTelemetry collector (`traces.endpoint`; Langfuse, "
    "Arize, Datadog and others take them), figures to Prometheus (`/metrics`), usage is in the ledger."
)
_GUARDRAILS = "There are no guardrails. Check prompts before they are sent, or in a proxy behind this gateway."
_MCP = "Tools are not called by the gateway. Let the client call its MCP servers, or a model server that does."
_UI = "Look at the console (`/console`); it has no such setting."
_SSO = "The console is opened with a key of the scope admin; there is no login by an identity provider."
_JWT = "Declare the identity provider in `identity.oidc`; see docs/identity.md."
_VAULT = (
    "Secrets come from the environment or from files: `{env: NAME}`, `{file: path}`. Let the vault's agent set them."
)
_ROUTES = "Routes cannot be opened or closed one by one. Give keys scopes, and close paths in the proxy before it."
_HEALTH = "Upstreams are probed, and taken out and back, by `health` and `upstreams[].probe_every_s`."
_SPEND_LOGS = "Usage is kept in the ledger, without prompts and answers; see docs/ledger.md."
_ALERTS = "Alerts come from Prometheus: the rules in deploy/, and `slos`; see docs/observability.md."
_TAGS = "Requests are not routed by tags. Give each group of callers models of its own (`tenants.NAME.models`)."
_FORWARD = "Nothing that a caller sends has a say in credentials or headers of upstreams. Set `upstreams[].headers`."
_BUDGET_DEFAULTS = "Set limits for each tenant and each key: `identity.limits_per_tenant`, `identity.limits_per_key`."
_PROMPTS = "Prompts of a prompt manager are not fetched. Send them, or put them into the chat template."
_STORES = "Vector stores are not searched by the gateway. Search them in the client, and send what was found."
_LEDGER_TASK = "The ledger is written by the gateway itself; there is nothing to tune."
_AWS_KEYS = "A Bedrock API key takes the place of signatures: set AWS_BEARER_TOKEN_BEDROCK."
_GOOGLE_KEYS = "An access token takes the place of credentials: set VERTEX_ACCESS_TOKEN, and renew it."
_ENTRA = "Entra ID is not spoken. Use the key of the resource, or put a proxy with the login before it."

DEPLOYMENT_NOTES: dict[str, Note] = {
    **_refuse(
        _AWS_KEYS,
        *("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "aws_session_name", "aws_role_name"),
        *("aws_profile_name", "aws_web_identity_token", "aws_sts_endpoint", "aws_external_id", "aws_secret_access_id"),
        *("aws_bedrock_runtime_endpoint", "aws_sagemaker_allow_zero_temp"),
    ),
    **_refuse(_GOOGLE_KEYS, "vertex_credentials", "vertex_ai_credentials", "litellm_credential_name"),
    **_ignore("It is for counting tokens by a call of its own; they are counted here.", "vertex_count_tokens_location"),
    **_refuse(
        _ENTRA,
        *("azure_ad_token", "tenant_id", "client_id", "client_secret", "azure_scope", "azure_username"),
        "azure_password",
    ),
    **_refuse(_TAGS, "tags", "tag_regex"),
    **_refuse(_GUARDRAILS, "guardrails", "guardrailConfig", "safety_settings"),
    **_refuse(_PROMPTS, "prompt_id", "prompt_variables", "prompt_label", "prompt_version"),
    **_refuse(_STORES, "vector_store_ids"),
    **_refuse("Set a budget of the model: `identity.limits.models.NAME`.", "max_budget", "budget_duration"),
    **_refuse("Batches run elsewhere: call the provider for them.", "s3_bucket_name", "s3_region_name"),
    **_refuse("Batches run elsewhere: call the provider for them.", "s3_access_key_id", "s3_secret_access_key"),
    **_refuse("Batches run elsewhere: call the provider for them.", "s3_encryption_key_id", "aws_batch_role_arn"),
    **_refuse("Try a new model on a share of requests by `routing.rollouts`.", "silent_model"),
    **_refuse(
        "Declare a model that is chosen for each request: `routing.auto`, see docs/routing.md.",
        *("complexity_router_config", "complexity_router_default_model", "adaptive_router_config"),
        *("auto_router_config", "auto_router_config_path", "auto_router_default_model", "auto_router_embedding_model"),
    ),
    **_refuse(
        "Certificates are always verified. Name the authority in `upstreams[].ca_file`.",
        "ssl_verify",
        "ssl_certificate",
    ),
    **_refuse("Point the model at `maitred serve --tiny`, which answers without a provider.", "mock_response"),
    **_refuse("Clients mark what is to be cached in their messages.", "cache_control_injection_points"),
    **_refuse("Put this into the chat template of the server.", "roles", "initial_prompt_value", "bos_token"),
    **_refuse("Put this into the chat template of the server.", "final_prompt_value", "eos_token"),
    **_refuse("It is a field of another API than chat completions.", "performanceConfig", "requestMetadata"),
    **_refuse("It is a field of another API than chat completions.", "serviceTier", "invocationId", "qualifier"),
    **_refuse("The provider's name of it goes into `upstreams[].model`.", "model_id"),
    **_ignore("A field that a server does not take is refused with what to send, or named.", "drop_params"),
    **_ignore("A field that a server does not take is refused with what to send, or named.", "additional_drop_params"),
    **_ignore("All fields that the server takes reach it; see docs/request-fields.md.", "allowed_openai_params"),
    **_ignore("LiteLLM looks its price up by it.", "base_model"),
    **_ignore("Chat completions stay chat completions.", "use_chat_completions_api"),
    **_ignore("Reasoning is a member of its own.", "merge_reasoning_content_in_choices"),
    **_ignore("An alternation of roles is left to the server.", "user_continue_message"),
    **_ignore("It concerns pass-through routes only.", "use_in_pass_through", "use_litellm_proxy"),
    **_ignore("A server that fails is left out by `health`.", "cooldown_time", "allowed_fails"),
    **_ignore("It only says what is logged.", "user_agent", "litellm_trace_id"),
    **_refuse("Private Service Connect: name the whole URL as `api_base`.", "use_psc_endpoint_format"),
    **_refuse("It belongs to a provider that is not spoken.", "adapter_id", "adapter_source", "adapter_base"),
    **_refuse("It belongs to a provider that is not spoken.", "project_id", "space_id", "voice", "input_type"),
}
"""Notes on settings of `litellm_params`."""

MODEL_NOTES: dict[str, Note] = {
    **_refuse("List the models in `tenants.NAME.models`.", "access_groups", "team_id", "team_public_model_name"),
    **_refuse("Have a file for each environment.", "supported_environments"),
    **_refuse("Name the prices of audio by the token: `admission.prices`.", "input_cost_per_audio_token"),
    **_refuse("Name the prices of audio by the token: `admission.prices`.", "output_cost_per_audio_token"),
    **_refuse("Prices are by the token.", "output_cost_per_second", "web_search_billing_unit"),
    **_refuse("Prices are by the token.", "search_context_cost_per_query"),
    **_refuse("Declare `routing.auto`; see docs/routing.md.", "adaptive_router_preferences"),
    **_refuse("Give the folder of the tokenizer in `models.NAME.tokenizer`.", "custom_tokenizer"),
    **_ignore("LiteLLM looks its price up by it. Look at `admission.prices`.", "base_model", "litellm_provider"),
    **_ignore(
        _HEALTH,
        *("health_check_model", "health_check_timeout", "health_check_max_tokens", "disable_background_health_check"),
        *("health_check_max_tokens_reasoning", "health_check_max_tokens_non_reasoning", "health_check_voice"),
    ),
    **_ignore("It describes the model for `/model/info`.", "version", "metadata", "supported_endpoints", "tier"),
    **_ignore("It describes the model for `/model/info`.", "description", "created_at", "updated_at", "db_model"),
}
"""Notes on settings of `model_info`."""

GENERAL_NOTES: dict[str, Note] = {
    **_refuse(
        "`--keys-from` takes its keys, teams and budgets. A database of our own, for several gateways, is `store.url`.",
        "database_url",
    ),
    **_ignore(
        _LEDGER_TASK,
        *("database_connection_pool_limit", "database_connection_timeout", "use_redis_transaction_buffer"),
        *("proxy_batch_write_at", "proxy_budget_rescheduler_min_time", "proxy_budget_rescheduler_max_time"),
    ),
    **_ignore(
        "Keys go on working while the store is away (`identity.max_stale_s`).", "allow_requests_on_db_unavailable"
    ),
    **_ignore("Keys are in memory, and follow the store within `identity.refresh_s`.", "user_api_key_cache_ttl"),
    **_refuse("Models stand in the file. Change it, and call `maitred config reload`.", "store_model_in_db"),
    **_refuse("Models stand in the file. Change it, and call `maitred config reload`.", "supported_db_objects"),
    **_refuse(
        _ALERTS,
        *("alerting", "alerting_threshold", "alerting_args", "alert_types", "alert_to_webhook_url", "alerts"),
        *("alert_type_config", "spend_report_frequency", "email_settings"),
    ),
    **_ignore(
        _HEALTH,
        *("background_health_checks", "health_check_interval", "health_check_details", "use_shared_health_check"),
        *("enable_health_check_routing", "health_check_ignore_transient_errors", "health_check_concurrency"),
    ),
    **_refuse(_JWT, "enable_jwt_auth", "litellm_jwtauth", "enable_oauth2_auth", "role_permissions"),
    **_refuse(_JWT, "enable_oauth2_proxy_auth", "oauth2_config_mappings"),
    **_refuse(
        "Code of your own cannot decide who calls. Use keys, or an identity provider (`identity.oidc`).",
        *("custom_auth", "custom_auth_settings", "custom_key_generate", "custom_key_update"),
    ),
    **_refuse(_SSO, "custom_sso", "custom_ui_sso_sign_in_handler", "UI_USERNAME", "UI_PASSWORD", "ui_access_mode"),
    **_refuse(_VAULT, "key_management_system", "key_management_settings"),
    **_refuse(_ROUTES, "public_routes", "admin_only_routes", "allowed_routes", "disable_key_management"),
    **_refuse("Close the port to others in the firewall.", "allowed_ips", "use_x_forwarded_for", "control_plane_url"),
    **_refuse(
        "Other paths are not passed on. Call that server directly, or put a proxy before both.",
        "pass_through_endpoints",
    ),
    **_refuse(
        _FORWARD,
        *("forward_client_headers_to_llm_api", "forward_llm_provider_auth_headers", "forward_openai_org_id"),
        *("add_user_information_to_llm_headers", "user_header_mappings", "user_header_name"),
    ),
    **_refuse("Keys are sent in `Authorization`, `x-api-key` or `api-key`.", "litellm_key_header_name"),
    **_refuse("Fields of requests cannot be demanded.", "enforce_user_param", "enforced_params"),
    **_refuse("Fields of requests cannot be demanded.", "service_account_settings", "reject_clientside_metadata_tags"),
    **_refuse(_MCP, "mcp_client_side_auth_header_name", "mcp_internal_ip_ranges", "user_mcp_management_mode"),
    **_refuse(_MCP, "enable_mcp_registry", "mcp_required_fields", "mcp_trusted_proxy_ranges"),
    **_refuse("Set `server.max_body_bytes`.", "max_request_size_mb"),
    **_refuse("Set `upstreams[].max_answer_bytes`.", "max_response_size_mb"),
    **_refuse("Set limits of the tenant: `tenants.NAME.limits`.", "token_rate_limit_type"),
    **_refuse("Set limits of the tenant: `tenants.NAME.limits`.", "global_max_parallel_requests"),
    **_refuse("Set limits of the tenant: `tenants.NAME.limits`.", "max_parallel_requests"),
    **_ignore(
        _SPEND_LOGS,
        *("disable_spend_logs", "disable_error_logs", "store_prompts_in_spend_logs", "store_prompts_in_cold_storage"),
        *("maximum_spend_logs_retention_period", "maximum_spend_logs_retention_interval"),
        *("maximum_spend_logs_cleanup_cron", "disable_adding_master_key_hash_to_db"),
    ),
    **_ignore("Every stream has its usage where it is asked for.", "always_include_stream_usage"),
    **_ignore("It only says what is logged; see `log.level`.", "set_verbose", "otel", "completion_model"),
    **_ignore("Nothing here is to be found by search engines.", "block_robots"),
    **_ignore("Responses belong to the tenant that made them.", "disable_responses_id_security"),
    **_refuse(_CALLBACKS, "datadog_api_key"),
    **_refuse("Teams are made by an operator only.", "default_team_disabled"),
}
"""Notes on settings of `general_settings`."""

LITELLM_NOTES: dict[str, Note] = {
    **_refuse(
        _CALLBACKS,
        *("callbacks", "success_callback", "failure_callback", "service_callback", "audit_log_callbacks"),
        *("s3_callback_params", "aws_sqs_callback_params", "langfuse_default_tags", "langfuse_public_key"),
        *("langfuse_secret_key", "langsmith_batch_size", "argilla_transformation_object", "cold_storage_custom_logger"),
        *("gcs_pub_sub_use_v1", "datadog_params", "langfuse_host", "logged_real_time_event_types"),
    ),
    **_refuse("See docs/metrics.md for what is counted, by model and organisation.", "prometheus_metrics_config"),
    **_refuse("See docs/metrics.md for what is counted, by model and organisation.", "custom_prometheus_tags"),
    **_refuse("See docs/metrics.md for what is counted, by model and organisation.", "prometheus_emit_stream_label"),
    **_refuse("See docs/metrics.md for what is counted.", "custom_prometheus_metadata_labels"),
    **_refuse("See docs/metrics.md for what is counted.", "prometheus_initialize_budget_metrics"),
    **_refuse("See docs/metrics.md for what is counted.", "enable_end_user_cost_tracking_prometheus_only"),
    **_ignore("`/metrics` asks for a key of the scope metrics.", "require_auth_for_metrics_endpoint"),
    **_ignore(
        "A field that a server does not take is refused with what to send, or named in `x-maitred-ignored`.",
        *("drop_params", "modify_params", "disable_add_transform_inline_image_block"),
    ),
    **_ignore("It only says what is logged; see `log.level`.", "set_verbose", "log_raw_request_response"),
    **_ignore("Prompts and keys are never logged.", "redact_user_api_key_info", "turn_off_message_logging"),
    **_ignore("Prompts and keys are never logged.", "global_disable_no_log_param", "redact_messages_in_exceptions"),
    **_ignore("Log records say it anyway.", "store_audit_logs", "suppress_debug_info"),
    **_ignore("Answers have `x-maitred-…` headers.", "return_response_headers"),
    **_ignore("Budgets count by calendar, in UTC.", "timezone"),
    **_ignore("Keys are in memory at every gateway.", "enable_redis_auth_cache"),
    **_ignore(
        "All fields that can change an answer are in the key of the cache.",
        "enable_caching_on_provider_specific_optional_params",
    ),
    **_ignore("Answers are checked by `routing.auto.NAME.escalation.schema`.", "enable_json_schema_validation"),
    **_ignore("A model that repeats itself ends at its `max_tokens`.", "REPEATED_STREAMING_CHUNK_LIMIT"),
    **_ignore(
        "The API that a client calls is the one that the server gets; see `upstreams[].responses`.",
        "route_all_chat_openai_to_responses",
    ),
    **_ignore("`traceparent` is passed on where a request is traced.", "forward_traceparent_to_llm_provider"),
    **_ignore("Usage is by tenant and key; there are no tags.", "extra_spend_tag_headers"),
    **_ignore("Usage is by tenant and key; there are no tags.", "disable_add_user_agent_to_request_tags"),
    **_ignore("Nothing is pretended.", "network_mock", "check_provider_endpoint"),
    **_ignore("Summaries are asked for by who calls.", "reasoning_auto_summary"),
    **_refuse(
        _GUARDRAILS,
        *("guardrails", "llm_guard_mode", "llamaguard_model_name", "google_moderation_confidence_threshold"),
        *("toxic_confidence_threshold", "blocked_user_list", "banned_keywords_list", "prompt_injection_params"),
        *("azure_content_safety_params", "skip_system_message_in_guardrail", "openai_moderations_model_name"),
        *("llamaguard_unsafe_content_categories", "vertex_ai_safety_settings", "secret_detection"),
    ),
    **_refuse("Certificates are always verified. Name the authority in `upstreams[].ca_file`.", "ssl_verify"),
    **_refuse("Clients' certificates are not sent. Put a proxy with them before the server.", "ssl_certificate"),
    **_refuse("TLS is as the system's OpenSSL has it.", "ssl_security_level", "ssl_ecdh_curve"),
    **_refuse(_MCP, "mcp_aliases", "mcp_semantic_tool_filter", "public_mcp_servers"),
    **_refuse(
        "Providers of your own: put a server with OpenAI's API before them, and name its URL.", "custom_provider_map"
    ),
    **_refuse(_ENTRA, "enable_azure_ad_token_refresh"),
    **_refuse(_GOOGLE_KEYS, "default_vertex_config", "vertex_project", "vertex_location"),
    **_refuse(
        _BUDGET_DEFAULTS,
        *("max_internal_user_budget", "internal_user_budget_duration", "default_internal_user_params"),
        *("default_team_params", "default_team_settings", "default_key_generate_params", "max_user_budget"),
        *("upperbound_key_generate_params", "key_generation_settings", "max_end_user_budget", "max_end_user_budget_id"),
        *("tag_budget_config", "default_team_models"),
    ),
    **_refuse("Classes and shares are set by `dispatch` and `tenants.NAME.weight`.", "priority_reservation"),
    **_refuse("Classes and shares are set by `dispatch` and `tenants.NAME.weight`.", "priority_reservation_settings"),
    **_refuse("Change the prices in `admission.prices`.", "cost_discount_config", "cost_margin_config"),
    **_refuse(_PROMPTS, "global_prompt_directory", "global_bitbucket_config", "global_gitlab_config"),
    **_refuse(
        _FORWARD, "forward_client_headers_to_llm_api", "model_group_settings", "add_user_information_to_llm_headers"
    ),
    **_refuse(_FORWARD, "forward_llm_provider_auth_headers", "enable_model_config_credential_overrides"),
    **_refuse(
        "Prompts are not shortened by the gateway; clients of `/v1/responses` can have them compacted.",
        "compression_interception_params",
    ),
    **_refuse("Batches run elsewhere: call the provider for them.", "enable_loadbalancing_on_batch_endpoints"),
    **_refuse(_CALLBACKS, "allow_dynamic_callback_disabling"),
    **_refuse(_UI, "ui_theme_config"),
    **_refuse("`--keys-from` takes its keys, teams and budgets. A database of our own is `store.url`.", "database_url"),
}
"""Notes on settings of `litellm_settings`."""

ROUTER_NOTES: dict[str, Note] = {
    **_refuse(_TAGS, "enable_tag_filtering", "tag_filtering_match_any"),
    **_refuse("Budgets are of tenants, keys and models: `identity.limits.models.NAME`.", "provider_budget_config"),
    **_ignore(
        "Conversations return to the server that has their prefix; see docs/replicas.md.",
        "deployment_affinity_ttl_seconds",
    ),
    **_ignore("Conversations return to the server that has their prefix.", "model_group_affinity_config"),
    **_ignore(
        "Failures count by what they are: refusals, faults of the request and others; see docs/upstreams.md.",
        "allowed_fails_policy",
        "retry_policy",
        "model_group_retry_policy",
    ),
    **_ignore("Retries wait by back-off with jitter, and as the server asks.", "retry_after"),
    **_ignore("What does not fit a model's window goes to its `context_length` fallbacks.", "enable_pre_call_checks"),
    **_ignore("A server that fails is left out for a while, but never the last one.", "disable_cooldowns"),
    **_ignore("The state of servers is each gateway's own.", "cache_params", "cache_responses", "client_ttl"),
    **_ignore("It only says what is logged; see `log.level`.", "set_verbose", "debug_level"),
    **_refuse(_ALERTS, "alerting_config"),
}
"""Notes on settings of `router_settings`."""

SECTION_NOTES: dict[str, Note] = {
    **_refuse(_GUARDRAILS, "guardrails", "policies", "policy_attachments"),
    **_refuse(_MCP, "mcp_servers", "mcp_aliases", "mcp_tools", "search_tools", "agents"),
    **_refuse(_PROMPTS, "prompts"),
    **_refuse(_STORES, "vector_store_registry"),
    **_refuse(_CALLBACKS, "callback_settings", "callbacks"),
    **_refuse(_JWT, "litellm_jwtauth"),
    **_refuse(_TAGS, "tag_routing"),
    **_refuse("Files, batches and fine tuning run elsewhere: call the provider for them.", "finetune_settings"),
    **_refuse("Files, batches and fine tuning run elsewhere: call the provider for them.", "files_settings"),
    **_refuse("Other paths are not passed on. Call that server directly.", "pass_through_endpoints"),
    **_refuse("Write each credential as `{env: NAME}` where it is used.", "credential_list"),
    **_refuse("Write these into each model's `upstreams[]`.", "default_litellm_params"),
    **_refuse("See docs/workers.md for several processes.", "worker_registry"),
}
"""Whole sections."""


def note_rest(section: SourceKey, notes: dict[str, Note]) -> None:
    """Says of each key of a section what its table says; keys that have a fate keep it."""
    for name, key in section.children():
        if (note := notes.get(name)) is not None:
            if note.fate is KeyFate.HARMLESS:
                key.ignore(note.text)
            else:
                key.refuse(note.text)
