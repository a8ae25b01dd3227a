"""The rules of `redact`: what a secret, an address, a host name and a telling path look like in a text.

Order matters: what looks like a secret goes before what only looks like a place.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from sparkforge.core.paths import ROOT
from sparkforge.core.urls import USER_INFO

TOKEN = "<token>"  # noqa: S105 - what stands in a token's place
Replacement = str | Callable[[re.Match[str]], str]
Rules = tuple[tuple[re.Pattern[str], Replacement], ...]

LOOPBACK = r"(?:127\.0\.0\.1|localhost|\[::1\])"
# Whose addresses stand in every log and say nothing about its owner.
PUBLIC = (
    r"(?:github\.com|raw\.githubusercontent\.com|ghcr\.io|huggingface\.co|docs\.vllm\.ai|vllm\.ai|docs\.docker\.com"
    r"|docker\.io|docs\.nvidia\.com|developer\.nvidia\.com|nvcr\.io|nvidia\.com|pytorch\.org|download\.pytorch\.org"
    r"|python\.org|nanobind\.readthedocs\.io|ubuntu\.com"
    r"|openaipublic\.blob\.core\.windows\.net|openai\.com|example\.com)"
)

# The end of a name that says that a secret follows. Where a short word could end a longer one (compass=), no letter may
# stand before it.
KEYWORD = (
    r"(?:token|secret|passw(?:or)?d|passwd|passphrase|passcode|credentials?|signature|cookie|authorization"
    r"|api[_.-]?keys?|(?:access|account|auth|client|crypt(?:ion)?|deploy|encryption|host|license|master|private|secret"
    r"|service|session|shared|sharedaccess|signing|ssh|storage|webhook)[_.-]?keys?(?:[_-]?id)?"
    r"|(?<![a-z])(?:pass|pwd|pw|bearer|auth|authn|csrf|jwt|otp|pin[_-]?code|psk|sas|sig|x-amz-credential)"
    r"|(?<=[_-])(?:pw|key)|(?<=_)(?:auth|pass|pat|pwd|sig)|sessid|session[_-]?id)"
    r"(?:[_-](?:base|value|b64|base64|hex|prod|test|old|new|live|id|string|\d{1,3})|\d{1,2})?"
)
SECRET_NAME = re.compile(rf"[\w.-]{{0,128}}?{KEYWORD}", re.IGNORECASE)
# Names that end like a secret's and are none.
HARMLESS_NAME = re.compile(
    r"(?i)(?:.*[_.-])?(?:public|cache|dict|group|hash|index|sort|primary|foreign|lookup|request|query|mapping|state|json"
    r"|attn|q|k|map|row|store)[_-]?keys?"
    r"|.*(?:bos|eos|pad|unk|sep|cls|mask|image|stop|special|first|last|next|per|one|each|prompt|output|max|num|new|bonus"
    r"|draft|sampled|start|end|placeholder)[_ -]?token(?:[_-]id)?"
)
QUOTE = r"(?:\\{0,8}[\"'`])"
# What can stand between a name and its value: ": ", "=", " => ", "%3D", and in a tuple or a list ", ".
BETWEEN = rf"{QUOTE}?[ \t]{{0,8}}(?:=>|:=|==?|:|%3[aAdD])[ \t]{{0,8}}|{QUOTE}[ \t]{{0,4}},\s{{0,8}}(?=b?\\{{0,8}}[\"'])"
# A value without quotes ends at a space or quote; at , ; & ) ] } only if the next pair or nothing follows.
BARE = r"(?:[^\s\"'`,;&)\]}\\]|\\(?![nrt\"'])|[,;&)\]}](?![\w.-]{0,64}[=:]|[\s\"'`,;&)\]}]|$))+"
QUOTED = (
    r"b?(?P<open>\\{1,8}[\"'`])(?P<escaped>(?:(?!(?P=open))[^\n]){0,4096})(?P<escaped_end>(?P=open))?"
    r"|b?(?P<quote>[\"'`])(?P<quoted>(?:(?!(?P=quote))[^\\\n]|\\[^\n]){0,4096})(?P<end>(?P=quote))?"
)
LISTED = r"(?P<list>[\[({][^\])}]{0,2000})"
NAMED_VALUE = re.compile(
    rf"(?P<name>(?!authorization){KEYWORD})(?P<between>(?>{BETWEEN}))"
    rf"(?:{LISTED}|{QUOTED}|(?P<bare>(?!<token>){BARE}))",
    re.IGNORECASE,
)
NO_SECRET = re.compile(
    r"(?i)(?:none|null|nil|true|false|yes|no|on|off|unset|not|required|invalid|missing|disabled|enabled|default|auto"
    r"|<[^<>]{1,40}>?|\*+|\.{2,}|\$\{?\w+\}?|\d{1,4}(?:\.\d+)?(?:ms|s|%)?|/[\w./-]*)?,?"
)
WORD_BEFORE = re.compile(r"[\w.-]{0,64}\Z")

# Plugins of detect-secrets whose formats count. The patterns of others look back and forth without bound, or hit words.
DETECTORS = (
    *("AWSKeyDetector", "ArtifactoryDetector", "AzureStorageKeyDetector", "DiscordBotTokenDetector"),
    *("GitHubTokenDetector", "GitLabTokenDetector", "MailchimpDetector", "PypiTokenDetector", "SendGridDetector"),
    *("SlackDetector", "SoftlayerDetector", "SquareOAuthDetector", "StripeDetector", "TelegramBotTokenDetector"),
    "TwilioKeyDetector",
)
# Formats that detect-secrets has not, or asks more of than a log that was cut still has.
OWN_TOKENS = re.compile(
    r"\b(?:"
    r"hf_(?:(?=[A-Za-z0-9]*[0-9A-Z])[A-Za-z0-9]{6,}|(?!(?:implementation|transformers?|quantization|integration"
    r"|checkpoints?|transfer|overrides|processor|tokenizer|download|pipeline|reference|generate)(?![A-Za-z0-9]))"
    r"[A-Za-z0-9]{8,})"
    r"|api_org_[A-Za-z0-9]{10,}|(?:sk|pk|rk)[-_](?:live|test|proj|ant)[-_][\w-]{6,}|sk-[\w-]{6,}|whsec_[\w+/=]{10,}"
    r"|gh[pousr]_\w{6,}|github_pat_\w{6,}|gl(?:pat|dt|ft|soat|rt|cbt|ptt|agent|oas|imt)-[\w-]{6,}"
    r"|nvapi-[\w-]{6,}|xox[abceoprs]-[\w-]{6,}|xapp-[\w-]{6,}|xai-\w{16,}|gsk_\w{16,}|r8_\w{16,}|pplx-\w{16,}"
    r"|tvly-\w{10,}|lsv2_\w{10,}|wandb_v1_\w{10,}"
    r"|(?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA)[A-Z0-9]{6,}|AIza[\w-]{20,}|ya29\.[\w-]{10,}|GOCSPX-[\w-]{10,}"
    r"|npm_[A-Za-z0-9]{20,}|pypi-Ag[\w-]{10,}|pypi-[\w-]{40,}|dckr_(?:pat|oat)_[\w-]{6,}|rubygems_[a-f0-9]{20,}"
    r"|SG\.[\w-]{10,}\.[\w-]{10,}|shp(?:at|ca|pa|ss)_\w{10,}|do[opr]_v1_\w{10,}|hv[sbr]\.[\w-]{10,}|dapi[a-f0-9]{32}"
    r"|lin_api_\w{10,}|ATATT3[\w=-]{10,}|figd_[\w-]{10,}|sq0(?:csp|atp)-[\w-]{10,}|EAAA[A-Za-z0-9_-]{40,}|glsa_\w{10,}"
    r"|ntn_\w{20,}|PMAK-[\w-]{10,}|tskey-[\w-]{10,}|sntrys_[\w+/=-]{10,}|AGE-SECRET-KEY-\w{10,}|ops_eyJ[\w-]{10,}"
    r"|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
)

# Top-level domains of a host name without a scheme. Those that are also the end of a file or module name (py, rs, sh,
# io, app, dev) count only behind a label with a digit or hyphen.
DOMAINS = (
    r"(?:com|net|org|edu|gov|mil|cloud|biz|tech|online|site|xyz|arpa|lan|corp|intranet|localdomain|onion"
    r"|de|at|ch|uk|fr|nl|eu|us|jp|cn|ru|se|dk|fi|pt|gr|cz|hu|ro|ie|br|mx|au|nz|kr|tw|za|il|tr|ua|ca|in|sg|hk)"
)
UNSURE_DOMAINS = r"(?:io|ai|dev|app|info|it|es|co|me|be|no|is|to|pl|local|internal|home|private|test)"
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST_NAME = re.compile(
    rf"(?<![\w.@/~%+-])(?!(?:www\.)?{PUBLIC}(?![\w-]))(?!{LABEL}\.(?:in|co|test|name|host|app)(?![\w.-]))"
    rf"(?=(?P<host>(?:{LABEL}\.){{1,8}}[A-Za-z]{{2,12}}(?![\w-])(?!\.\w)))(?P=host)(?!\()",
)
MODULES = {"threading.local", "torch.it", "np.info", "logger.info", "logging.info", "log.info", "asyncio.to"}

# Folders whose contents are the same for everybody, in our container and on a plain Linux.
COMMON = (
    *("/usr/", "/opt/venv/", "/lib/", "/lib64/", "/etc/", "/proc/", "/sys/", "/dev/", "/run/", "/bin/", "/models/"),
    *("/var/cache/sparkforge/", "/var/run/docker.sock/", "/v1/"),
)
PERSONAL = ("/run/media/", "/run/user/", "/dev/shm/", "/usr/home/")  # noqa: S108 - not opened, only looked for
PACKAGES = re.compile(r".*?/((?:site|dist)-packages/.*)")


def is_secret_name(name: str) -> bool:
    """Tell whether what a variable, key, header or flag of this name holds is a secret."""
    name = name.strip("-").strip()
    return SECRET_NAME.fullmatch(name) is not None and HARMLESS_NAME.fullmatch(name) is None


def _named_value(match: re.Match[str]) -> str:
    """Replace the value behind a secret's name; keep words that are no secrets, such as None."""
    before = WORD_BEFORE.search(match.string, max(0, match.start() - 64), match.start())
    name = (before[0] if before else "") + match["name"]
    if HARMLESS_NAME.fullmatch(name):
        return match[0]
    prefix = match["name"] + match["between"]
    if (listed := match["list"]) is not None:
        return (
            prefix + re.sub(r"""(b?\\{0,8}["'`])[^"'`\n]*""", _list_item, listed)
            if re.search(r"[\"'`]", listed)
            else f"{prefix}{listed[0]}{TOKEN}"
        )
    for opening, text, end in (("open", "escaped", "escaped_end"), ("quote", "quoted", "end")):
        if match[opening] is not None:
            if NO_SECRET.fullmatch(match[text]):
                return match[0]
            return f"{prefix}{match[opening]}{TOKEN}{match[end] or ''}"
    return match[0] if NO_SECRET.fullmatch(match["bare"]) else prefix + TOKEN


def _list_item(match: re.Match[str]) -> str:
    """Replace what a quotation mark of a list opens; separators stand behind a closing one."""
    text = match[0][len(match[1]) :]
    return match[0] if re.fullmatch(r"[\s,:]*", text) or NO_SECRET.fullmatch(text) else match[1] + TOKEN


def _flag(match: re.Match[str]) -> str:
    """Replace the value behind a flag with a secret's name."""
    return f"{match[1]}{match[3]}{TOKEN}" if is_secret_name(match[2]) else match[0]


def _whole(match: re.Match[str]) -> str:
    """Replace a match of detect-secrets, or its group if it has one, without the space or quote around it."""
    text = next((group for group in match.groups() if group), match[0]).strip(" \t\r\n\"'=:")
    return match[0].replace(text, TOKEN)


def _host_name(match: re.Match[str]) -> str:
    """Replace a host name, and keep what is the name of a module or file."""
    name = match["host"]
    top = name.rpartition(".")[2].lower()
    if re.fullmatch(DOMAINS, top):
        return "<host>"
    if re.fullmatch(UNSURE_DOMAINS, top) and name not in MODULES:
        sure = top in {"local", "internal"} or re.search(r"[\d-]", name.rpartition(".")[0])
        return "<host>" if sure and not re.match(r"\d", name) else name
    return name


def _path(match: re.Match[str]) -> str:
    """Keep a path's last part where it lies deeper than a home: a model is known by it."""
    parts = [part for part in match[0].split("/") if part]
    return f"<path>/{parts[-1]}" if len(parts) > 2 else "<path>"


def _support_path(match: re.Match[str]) -> str:
    """Keep also what lies in a checkout, in a Python package, or where every machine has the same."""
    path = match[0]
    if path.count("/") == 1 and path[0] == "/":  # a route of the API, or a top folder
        return path
    if f"{path.rstrip('/')}/".startswith(COMMON) and not path.startswith(PERSONAL):
        return path
    if path.startswith(f"{ROOT}/") and len(ROOT.parts) > 1:
        return f"<checkout>/{path.removeprefix(f'{ROOT}/')}"
    inside = PACKAGES.fullmatch(path)
    return f"<path>/{inside[1]}" if inside else _path(match)


def _address(match: re.Match[str]) -> str:
    """Replace what is an IP address, unless it means this very machine or none."""
    try:
        address = ipaddress.ip_address(match[0].partition("%")[0])
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "<address>"


def _hosts(allowed: str) -> re.Pattern[str]:
    """Match the authority of a URL of any scheme but file, unless it is one of `allowed`."""
    return re.compile(
        rf"(?i)(?<![a-z0-9+.-])(?!file:)([a-z][a-z0-9+.-]{{1,30}})://(?!{allowed}(?:[:/?#\s\"'>)\]]|$))[^\s/\"'?#]+"
    )


def _detected() -> Rules:
    """Return the token formats of detect-secrets. Imported here: the package takes a tenth of a second."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class  # noqa: PLC0415

    detectors: list[Any] = list(get_mapping_from_secret_type_to_class().values())
    plugins = {plugin.__name__: plugin for plugin in detectors}
    patterns = [pattern for name in DETECTORS for pattern in plugins[name].denylist]
    # The pattern for AWS's secret key is left out: our own rules find it by its name.
    return tuple((pattern, _whole) for pattern in patterns if not pattern.pattern.startswith("aws."))


@cache
def secrets() -> Rules:
    """Return the rules for secrets."""
    header = r"(?:bearer|basic|token|negotiate|apikey|api-key|ntlm|oauth)"
    login = r"(?:(?:-[a-zA-Z]{0,6}u|-U|--(?:proxy-)?user)(?:[ =]\s{0,4}|(?=[\w\"'])))"
    return (
        (
            re.compile(
                r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
                r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
                re.DOTALL,
            ),
            TOKEN,
        ),
        (USER_INFO, f"{TOKEN}@"),
        (re.compile(r"(?i)(%3a%2f%2f)[^\s/\"'<>]{1,256}?%40"), rf"\1{TOKEN}%40"),
        *_detected(),
        (OWN_TOKENS, TOKEN),
        # Headers first: their value goes on behind a space.
        (re.compile(rf"(?i)(authorization{QUOTE}?\s{{0,4}}[:=,]\s{{0,4}}(?:b?{QUOTE})?(?:digest|aws4-hmac-sha256)\s+)[^\n]+"),
         rf"\1{TOKEN}"),
        (re.compile(rf"(?i)(authorization{QUOTE}?\s{{0,4}}[:=,]\s{{0,4}}+(?:b?{QUOTE})?+(?:{header}\s+)?+)(?!<token>)[^\s\"'\\]+"
                    r"(?:[ \t]+(?!-)[^\s\"'\\]+)?"),
         rf"\1{TOKEN}"),
        (re.compile(rf"(?i)((?:set-)?cookies?{QUOTE}?\s{{0,4}}[:=,]\s{{0,4}}(?:b?{QUOTE})?)(?=[\w-]{{1,64}}=)[^\"'\n\\]+"),
         rf"\1{TOKEN}"),
        (re.compile(r"(?i)((?:\s-b|--cookie)[ =]\s{0,4}[\"']?)(?=[\w-]{1,64}=)[^\"'\n\s]+"), rf"\1{TOKEN}"),
        (re.compile(r"(?i)\b(bearer|basic)\s+(?!auth|authentication\b|access\b|<)[\w.~+/=-]{6,}"), rf"\1 {TOKEN}"),
        (re.compile(r"\b(token)\s+(?=[a-z]{0,40}\d)[0-9a-f]{32,}\b"), rf"\1 {TOKEN}"),
        # Logins: curl -u user:password, .netrc, programs that take a password as an argument.
        (re.compile(rf"(?<!\S)({login})([\"'])([^:\"'\n]{{0,128}}:)(?!\d+\2)[^\"'\n]+"), rf"\1\2\3{TOKEN}"),
        (re.compile(rf"(?<!\S)({login})([^\s:\"'=/]{{0,128}}:)(?!\d+(?:\s|$)|//)[^\s\"']+"), rf"\1\2{TOKEN}"),
        (re.compile(r"(?i)(?<!\S)(login\s+)\S+(\s+password\s+)\S+"), rf"\1<user>\2{TOKEN}"),
        (re.compile(r"(?i)\b((?:sshpass|(?:docker|podman|helm|oras|skopeo)\s+(?:registry\s+)?login|mysql\w{0,12}|redis-cli)\b"
                    r"[^\n|;&]{0,200}?\s-[pa]\s?)(?!ort\b|<)([\"']?)[^\s\"']+"),
         rf"\1\2{TOKEN}"),
        (re.compile(r"(?i)(?<![\w-])((?:ENV\s+)?(?:[A-Za-z0-9]{1,32}_){1,6}(?:key|token|secret|password)[ \t]+)"
                    r"(?!<)(?=\S{0,120}\d)[\w+/=.-]{16,}"),
         rf"\1{TOKEN}"),
        (re.compile(r"(?i)\b(password\s+(?:for\s+[\w.@'-]{1,64}\s{0,4}:|is)\s+)(?!<)(?=\S{0,64}\d)\S+"), rf"\1{TOKEN}"),
        (re.compile(r"\b(ENV\s+\w{0,64}?(?:KEY|TOKEN|SECRET|PASSWORD|PASS)\s+)(?!<)\S+"), rf"\1{TOKEN}"),
        (re.compile(r"(?i)\b((?:identified\s+by|password)\s+)(['\"])(?!<token>)[^'\"\n]+"), rf"\1\2{TOKEN}"),
        (re.compile(rf"(?i)(<(?!token>)[\w:.-]{{0,64}}?{KEYWORD}>)(?!<)[^<\n]+"), rf"\1{TOKEN}"),
        # {"name": "API_KEY", "value": "…"}, in either order, also over lines as in YAML.
        (re.compile(rf"(?i)({KEYWORD}{QUOTE}?\s{{0,40}}[,;]?\s{{0,40}}{QUOTE}?val(?:ue)?{QUOTE}?\s{{0,4}}[:=]\s{{0,4}}+{QUOTE}?+)"
                    r"(?!<token>)[^\"'\\\n]+"),
         rf"\1{TOKEN}"),
        (re.compile(rf"(?i)({QUOTE}value{QUOTE}\s{{0,4}}:\s{{0,4}}{QUOTE})[^\"'\\\n]{{1,512}}"
                    rf"(?={QUOTE}\s{{0,40}},\s{{0,40}}{QUOTE}(?:name|key){QUOTE}\s{{0,4}}:\s{{0,4}}{QUOTE}[\w.-]{{0,64}}?{KEYWORD}{QUOTE})"),
         rf"\1{TOKEN}"),
        (re.compile(rf"(?i)((?<![a-z]){KEYWORD}{QUOTE}?:[ \t]{{0,8}})((?:\n[ \t]{{0,40}}- [^\n]{{1,512}})+)"),
         lambda match: match[1] + re.sub(r"(- [\"']?)[^\n\"']+", rf"\1{TOKEN}", match[2])),
        (re.compile(r"(?<![\w-])(--?([A-Za-z][\w-]*+))(\s+(?:\\\n\s*)?[\"']?|[\"'],\s{0,8}[\"'])"
                    r"(?!-|id=)((?<=[\"'])[^\"'\n]+"
                    r"|[^\s,;&\"']+(?:[ \t]+(?!-)(?=[^\s\"']{0,80}\d)[^\s,;&\"'/]+(?=\s|$))*)"),
         _flag),
        (NAMED_VALUE, _named_value),
        (re.compile(r"(?<![\w.+-])[\w.+-]{1,64}:[^\s@:/\"'<>]{1,128}@(?=[\w-]+\.)"), f"{TOKEN}@"),
        (re.compile(r"(?<![\w.+-])[\w.+-]++@[\w-]{1,63}(?:\.[\w-]{1,63})+"), "<address>"),
        (re.compile(r"(?im)(?:(?<=\bssh )|(?<=\bscp )|(?<=\brsync )|(?<=\bsftp )|(?<=\[)|^)"
                    r"[a-z_][\w.-]{0,31}@(?!sha\d|latest|main\b)[a-z][\w-]{0,62}\b"),
         "<address>"),
    )  # fmt: skip


MACHINES: Rules = (
    (re.compile(r"(?i)(?<![\w:-])(?:[0-9a-f]{2}[:-]){5,19}[0-9a-f]{2}(?![\w:-])"), "<address>"),
    (re.compile(r"(?i)(?<![\w.:-])[0-9a-f]{4}([.:-])[0-9a-f]{4}\1[0-9a-f]{4}(?![\w.:-]\w|\w)"), "<address>"),
    (re.compile(r"(?i)(?<![\w.:-])(?:0x)?(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![\w:])"), "<address>"),
    (re.compile(r"(?i)\b((?:mac|hwaddr|ether|lladdr)[\w ]{0,12}[=: ]\s{0,4}[\"']?)[0-9a-f]{12}\b"), r"\1<address>"),
    (
        re.compile(
            r"(?i)(?<![\w.])(?<!::)(?![0-9a-f:]{40})(?=[0-9a-f]{0,4}:[0-9a-f]{0,4}:)[0-9a-f:]{2,39}(?:(?:\d{1,3}\.){3}\d{1,3})?(?:%\w+)?(?![\w:]|\.\d)"
        ),
        _address,
    ),
    # Four numbers are a version behind a comparison, the word, or cuDNN's name: 9.20.0.48.
    (
        re.compile(
            r"(?i)(?<![\w.])(?<![=<>~!]=)(?<!cudnn )(?<!cu\d\d-)(?<!ersion )(?<!ersion=)(?<!ersion: )(?<!ersion = \")"
            r"(?<!ersion\": \")(?:\d{1,3}\.){3}\d{1,3}(?![\w.]\d)"
        ),
        _address,
    ),
    (
        re.compile(r"(?i)\b(?:MIG-)?(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4,12}){4}(?:/\d{1,3}){0,2}"),
        "<gpu>",
    ),
    (
        re.compile(
            r"(?i)\b((?:(?:machine|boot|product|gpu|system)[_-]?u?uid|machine[_-]id|serial(?:[_ -]?(?:number|no))?)"
            r"[\"']?\s{0,8}[=:]\s{0,8}[\"']?)(?!n/a|none|null|<)[\w-]{6,64}"
        ),
        r"\1<id>",
    ),
    (re.compile(r"(?m)^((?:\([^)\n]*\) *)*)[\w.-]+(?=:\d+:\d+ \[\d+\] )"), r"\1<host>"),  # NCCL: HOST:PID:TID [GPU]
    (
        re.compile(
            r"(?i)\b((?:hostname|nodename|fqdn|computer_?name)[\"']?\s{0,4}[=:]\s{0,4}[\"']?)(?!<)[\w.-]{1,128}"
        ),
        r"\1<host>",
    ),
    (re.compile(r"\b((?:SUDO_USER|USER|LOGNAME|USERNAME)=)(?!root\b|<)[\w.@-]{1,64}"), r"\1<user>"),
    (re.compile(r"\b([ug]id=\d{1,10}\()(?!root\b|<)[\w.@-]{1,64}"), r"\1<user>"),
    (HOST_NAME, _host_name),
)
# A home wherever it stands (-I/home/anna/include, file:///home/anna), any other path where one can begin. Before them
# homes in other forms: escaped slashes, percent signs, a space in a name, Windows, ~anna.
HOMES: Rules = (
    (re.compile(r"(?i)(?:\\{1,4}/|%2f)(?:home|Users)(?:(?:\\{1,4}/|%2f)[\w.+@~-]{1,128}){1,32}"), "<path>"),
    (re.compile(r"(?<=[\"'])/(?:home|Users)/(?=[^\"'\n]{0,256} )[^\"'\n]{1,512}(?=[\"'])"), "<path>"),
    (re.compile(r"(?i)\b[a-z]:(?:\\{1,4}|/)Users(?:\\{1,4}|/)[^\\/\s\"']{1,64}"), "<path>"),
    (re.compile(r"(?<![\w./~-])~[a-z_][\w.-]{0,31}(?=/)"), "<path>"),
    (re.compile(r"/(?:mnt|media|data|srv|scratch|export|nfs|net|var)/"
                r"(?:[\w.+-]{1,64}/){0,4}?(?:home|[Uu]sers|people|user)/[\w.+@~-]{1,128}/?(?![\w/])"), "<path>"),
)  # fmt: skip
PATHS = re.compile(
    r"/(?:home|Users|root|media|mnt)(?:/[\w.+@~%-]+)+/?|(?:(?<![\w./>])|(?<=file://))~?/(?:[\w.+@~%-]+/)*[\w.+@~%-]+/?"
)


@cache
def strict() -> Rules:
    """Return the rules for what is published."""
    return (*secrets(), (_hosts(LOOPBACK), r"\1://<host>"), *MACHINES, *HOMES, (PATHS, _path))


@cache
def support() -> Rules:
    """Return the rules for what somebody must still be able to read."""
    return (
        *secrets(),
        # The middle of a key whose first line was cut off: base64 alone on its line. A sha256 has no capitals.
        (re.compile(r"(?m)^(?=[^A-Z\n]{0,80}[A-Z])[A-Za-z0-9+/=]{60,80}$"), TOKEN),
        (_hosts(rf"(?:{LOOPBACK}|{PUBLIC})"), r"\1://<host>"),
        *MACHINES,
        *HOMES,
        (PATHS, _support_path),
    )
