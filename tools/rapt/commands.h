/* commands.h - the commands and their options */
#ifndef RAPT_TOOL_COMMANDS_H
#define RAPT_TOOL_COMMANDS_H

#include "cli.h"

int run_run(const arguments *a), run_check(const arguments *a), run_inspect(const arguments *a);
int run_plot(const arguments *a), run_convert(const arguments *a), run_bench(const arguments *a);
int run_info(const arguments *a);

extern const option layer_options[], as_options[], input_options[]; /* what several commands take */
extern const option rotary_options[];
extern const option run_options[], check_options[], inspect_options[], plot_options[], convert_options[];
extern const option bench_options[], info_options[];

#endif
