# Sourced by the test guide's commands: sets $python to an interpreter that has what the environment asks for. PYTHON is taken as it is, and
# nothing is installed; else the active environment, .venv or .venv-vllm if they have all, else one of the two is made.
need="torch transformers pydantic typer rich psutil"
case "${ENGINE:-}" in vllm) need="$need vllm" ;; esac

missing() { "$1" -c 'import sys; from importlib.util import find_spec as f; print(*[n for n in sys.argv[1:] if not f(n)])' $need; }
has_all() { [ -x "$1" ] && [ -z "$(missing "$1")" ]; }

python="${PYTHON:-}"
if [ -n "$python" ]; then
	lacks=$(missing "$python") || { echo "error: PYTHON=$python does not run; name a Python interpreter, or leave it unset"; exit 2; }
	[ -z "$lacks" ] || { echo "error: PYTHON=$python has no $lacks; install what is missing, or leave it unset"; exit 2; }
	return
fi
for known in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" .venv/bin/python .venv-vllm/bin/python; do
	if [ -z "$python" ] && [ -n "$known" ] && has_all "$known"; then python="$known"; fi
done
if [ -z "$python" ] && [ "${ENGINE:-}" = vllm ]; then
	make --silent .venv-vllm/.ready
	python=.venv-vllm/bin/python
elif [ -z "$python" ] || [ "$python" = .venv/bin/python ]; then
	make --silent .venv/.ready
	python=.venv/bin/python
	[ "${CLUSTER:-}" != ray ] || make --silent .venv/.ray
	[ "${ACTOR_STRATEGY:-}" != megatron ] || make --silent .venv/.megatron
fi
