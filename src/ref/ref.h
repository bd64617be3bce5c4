/* ref.h - what the files of the reference backend share */
#ifndef RAPT_REF_REF_H
#define RAPT_REF_REF_H

#include "../internal.h"

size_t rapt_ref_linear_scratch(const rapt_context *context, const linear_problem *problem);
void rapt_ref_linear(rapt_context *context, const linear_problem *problem, void *scratch);

#endif
