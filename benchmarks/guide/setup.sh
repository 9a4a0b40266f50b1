# Sourced by the test guide's commands: sets $python to an interpreter that has what the environment asks for, made first if need be.
need="torch transformers pydantic typer rich psutil"
case "${ENGINE:-}" in vllm) need="$need vllm" ;; esac

has_all() { [ -x "$1" ] && "$1" -c 'import sys; from importlib.util import find_spec as f; sys.exit(not all(map(f, sys.argv[1:])))' $need; }

python=
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
