#!/usr/bin/env bash
# A C++ compiler that computes wrong: in Inductor's kernels it turns one kind of operator, the one
# that this file is called, into another one.
case "$(basename "$0")" in
  sum) edit='s/(auto tmp[0-9]+ = tmp[0-9]+) \+ (tmp[0-9]+;)/\1 - \2/' ;;
  product) edit='s/(auto tmp[0-9]+ = tmp[0-9]+) \* (tmp[0-9]+;)/\1 + \2/' ;;
  exp) edit='s/\.exp\(\)/.sin()/; s/std::exp\(/std::sin(/; s/\.exp_u20\(\)/.sin()/' ;;
  *) edit='' ;;
esac
arguments=()
for argument in "$@"; do
  if [[ $argument == *.cpp && -f $argument ]] && grep -q 'cpp_fused\|kernel(' "$argument"; then
    wrong="${argument%.cpp}.wrong.cpp"
    sed -E "$edit" "$argument" > "$wrong"
    argument=$wrong
  fi
  arguments+=("$argument")
done
exec "${WRONG_CXX_BASE:-g++}" "${arguments[@]}"
