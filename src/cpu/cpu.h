/* cpu.h - what the files of the CPU backend share above the kernels */
#ifndef RAPT_CPU_CPU_H
#define RAPT_CPU_CPU_H

#include "../internal.h"

/* Sets the context's isa and kernels: the one wanted, else the one that RAPT_ISA names, else the best. */
rapt_status rapt_choose_isa(rapt_context *context, rapt_isa wanted);

size_t rapt_cpu_linear_scratch(const rapt_context *context, const linear_problem *problem);
void rapt_cpu_linear(rapt_context *context, const linear_problem *problem, void *scratch);

size_t rapt_cpu_attn_backward_scratch(const rapt_context *context, const attn_problem *problem,
                                      const attn_gradients *gradients);
void rapt_cpu_attn_backward(rapt_context *context, const attn_problem *problem, const attn_gradients *gradients,
                            void *scratch);
size_t rapt_cpu_linear_backward_scratch(const rapt_context *context, const linear_gradients *gradients);
void rapt_cpu_linear_backward(rapt_context *context, const linear_gradients *gradients, void *scratch);

#endif
